// Frames between a node and its worker: bytes <-> messages, as protocol/05-worker.md says. No engine, no threads.
//
//     u32 body length | u16 kind | u16 reserved, 0 | u64 request id | body          (little-endian)
#pragma once

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "sample.h"
#include "stage.h"

namespace meshnode {

static_assert(std::endian::native == std::endian::little, "frames are read in place");

constexpr uint32_t kWorkerVersion = 2;
constexpr size_t   kHeaderBytes   = 16;
constexpr uint32_t kUnloadedBound = 64 * 1024;    // of a body before LOADED: a LOAD of the largest set fits
constexpr uint64_t kTextBound     = 1024 * 1024;  // least bound of a body after it: a long text to tokenize
constexpr uint64_t kSlack         = 64 * 1024;    // fixed fields beside the largest array
constexpr uint64_t kBodyCap       = 1u << 30;     // whatever a model claims
constexpr uint32_t kMaxPieces     = 4096;         // ids of one PIECES, so that its reply is bounded
constexpr uint32_t kMaxSessions   = 256;          // sequences of one context of the engine
constexpr uint32_t kMaxContext    = 1u << 24;     // positions; far beyond what models are trained for
constexpr uint32_t kMaxStep       = 1u << 16;     // positions
constexpr uint32_t kMaxThreads    = 1024;
constexpr uint32_t kMaxFiles      = 512;      // of a set of shards
constexpr uint32_t kKeepAll       = 0xffffffff;

// Longest body of a request once a model is loaded; of a reply four times that (a byte of text makes at most one id).
uint32_t request_bound(uint64_t n_embd, uint64_t n_ctx, uint64_t max_step);

enum class Kind : uint16_t {
    load = 1, open, step, truncate, close, tokenize, pieces, describe_chat, fork,
    hello = 0x80, loaded, opened, stepped, truncated, closed, tokens, piece_list, chat_facts, forked, error = 0xff,
};

// One frame is wrong, the next can be read.
struct BadFrame : StageError {
    explicit BadFrame(const std::string & what) : StageError("bad_frame", what) {}
};

// Where the next frame begins is not known any more.
struct FramingLost : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// ---- requests

// A file and the state that it was in when it was identified.
struct ModelFile {
    std::string path;
    uint64_t device = 0, inode = 0, size = 0;
    int64_t  mtime_ns = 0, ctime_ns = 0;
};

struct Load {
    static constexpr Kind kind = Kind::load;
    std::vector<ModelFile> files;  // one, or a set of shards in order
    Layers   layers;               // end < 0: every layer
    uint32_t n_sessions = 0, n_ctx = 0, max_step = 0, n_threads = 0;
    Numerics numerics = Numerics::invariant;
};

struct Open {
    static constexpr Kind kind = Kind::open;
    uint64_t handle = 0;
    Sampling sampling;
    uint32_t start = 0;  // position of the first generated token: the grammar is of the text from there on
    std::vector<int32_t> prompt;
};

// A session with the first `keep` positions of another one's cache and history.
struct Fork {
    static constexpr Kind kind = Kind::fork;
    uint64_t handle = 0, from = 0;
    uint32_t keep = 0;
    Sampling sampling;
    uint32_t start = 0;
    std::vector<int32_t> prompt;  // goes on from position `keep`
};

// tokens and residual point into the frame's body.
struct Push {
    static constexpr Kind kind = Kind::step;
    uint64_t handle = 0;
    int32_t  first_pos = 0;
    Layers   effective;
    bool     sample = false;
    std::span<const int32_t> tokens;    // exactly one of the two is not empty
    std::span<const float>   residual;  // [n, n_embd]
};

struct Truncate {
    static constexpr Kind kind = Kind::truncate;
    uint64_t handle = 0;
    uint32_t keep = 0;
};

struct Close {
    static constexpr Kind kind = Kind::close;
    uint64_t handle = 0;
};

struct Tokenize {
    static constexpr Kind kind = Kind::tokenize;
    bool chat = false, add_special = false, parse_special = false;
    std::string          text;      // unless chat
    std::vector<Segment> segments;  // if chat
};

struct Pieces {
    static constexpr Kind kind = Kind::pieces;
    std::vector<int32_t> ids;
};

struct DescribeChat {
    static constexpr Kind kind = Kind::describe_chat;
};

using Request = std::variant<Load, Open, Push, Truncate, Close, Tokenize, Pieces, DescribeChat, Fork>;

// ---- replies

struct Hello {
    static constexpr Kind kind = Kind::hello;
    uint32_t    version = kWorkerVersion;
    std::string engine;
};

struct LoadedReply {
    static constexpr Kind kind = Kind::loaded;
    Loaded loaded;
};

struct Opened {
    static constexpr Kind kind = Kind::opened;
};

struct Sampled {
    int32_t     token = 0;
    bool        is_end = false;
    std::string piece;
    struct Likely {
        int32_t     token = 0;
        double      logprob = 0;
        std::string piece;
    };
    struct Logprobs {
        double              chosen = 0;
        std::vector<Likely> top;  // at most kMaxLogprobs
    };
    std::optional<Logprobs> logprobs;  // when they were asked for
};

struct Stepped {
    static constexpr Kind kind = Kind::stepped;
    uint64_t compute_ns = 0;
    std::variant<std::monostate, std::span<const float>, Sampled> output;  // the span is not owned
};

struct Truncated {
    static constexpr Kind kind = Kind::truncated;
};

struct Closed {
    static constexpr Kind kind = Kind::closed;
};

struct Tokens {
    static constexpr Kind kind = Kind::tokens;
    std::vector<int32_t> ids;
};

struct PieceList {
    static constexpr Kind kind = Kind::piece_list;
    std::vector<std::string> pieces;
};

struct ChatFactsReply {
    static constexpr Kind kind = Kind::chat_facts;
    ChatFacts facts;
};

struct Forked {
    static constexpr Kind kind = Kind::forked;
};

struct Error {
    static constexpr Kind kind = Kind::error;
    std::string code, message;
};

using Reply = std::variant<Hello, LoadedReply, Opened, Stepped, Truncated, Closed, Tokens, PieceList, ChatFactsReply, Forked, Error>;

// ---- bytes

struct Frame {
    uint16_t kind = 0;
    uint64_t id = 0;
    uint32_t length = 0;
    std::unique_ptr<std::byte[]> bytes;  // allocated only after length was found within its bound

    std::span<const std::byte> body() const { return {bytes.get(), length}; }
};

// Reads at most n bytes, 0 at the end; may give fewer.
using ReadSome = std::function<size_t(std::byte * into, size_t n)>;

// False at the end between two frames. Throws FramingLost: reserved not 0, too long, or the end within a frame.
// The bound may rise while this waits for a header.
bool read_frame(const ReadSome & read, const std::atomic<uint32_t> & bound, Frame & frame);

// Throw BadFrame unless the whole body is exactly one message of that kind. A Push or a residual points into body,
// which has to be aligned for float.
Request decode_request(uint16_t kind, std::span<const std::byte> body);
Reply   decode_reply(uint16_t kind, std::span<const std::byte> body);

// Header and body, in place of what out held.
void encode(std::vector<std::byte> & out, uint64_t id, const Request & request);
void encode(std::vector<std::byte> & out, uint64_t id, const Reply & reply);

}  // namespace meshnode

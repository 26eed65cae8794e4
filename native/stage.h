// A stage computes an effective range of layers of one artifact for many sessions.
//
// This header is narrow so that the rest of the worker does not depend on the engine: stage.cpp is the only file
// that includes llama.h. Shapes: n positions, n_embd channels, row-major float32; a residual is [n, n_embd].
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace meshnode {

// Half-open, 0-based, in layers of the artifact.
struct Layers {
    int32_t begin = 0;
    int32_t end   = 0;
};

enum class Numerics : uint8_t { invariant = 0, fast = 1 };

// A fault that has a stable code of docs/errors.md; anything else that escapes is a bug of the worker.
struct StageError : std::runtime_error {
    StageError(std::string_view code, const std::string & what) : std::runtime_error(what), code(code) {}
    std::string code;
};

struct LoadOptions {
    std::vector<std::string> paths;  // of the descriptors handed over by the node, /proc/self/fd/N: a file, or all shards
    Layers      layers;          // the holding; end < 0 means every layer
    uint32_t    n_sessions = 4;  // KV streams
    uint32_t    n_ctx      = 2048;  // KV cells a session
    uint32_t    max_step   = 256;   // positions a step may carry (the prompt chunk)
    uint32_t    n_threads  = 1;
    Numerics    numerics   = Numerics::invariant;
    bool        unproven   = false;  // accept architectures that are not on the list: for the tests that prove them
};

// What was loaded, read back from the engine: never an echo of LoadOptions.
struct Loaded {
    std::string architecture;
    Layers      layers;
    int32_t     n_layer     = 0;  // of the whole artifact
    int32_t     n_embd      = 0;
    int32_t     n_vocab     = 0;
    int32_t     n_ctx_train = 0;
    uint32_t    n_sessions  = 0;
    uint32_t    n_ctx       = 0;
    uint32_t    max_step    = 0;
    bool        has_template = false;
    uint64_t    tensor_bytes = 0;  // of owned tensors, as stored in the file
    uint64_t    kv_bytes     = 0;
    std::string certificate;  // canonical JSON: what is proven of this architecture, with these weights and numerics
    std::string recipe;       // canonical JSON: all that fixes this build's and this load's numbers
    std::string fingerprint;  // hex SHA-256 of the bits of a fixed probe
};

// Of a residual's values. Gemma's reach 98,407; below this a norm's sum of squares stays finite at any width.
constexpr float kAbsurd = 1e8f;

// One push: n consecutive positions of one session.
struct Step {
    uint32_t                 slot      = 0;  // KV stream, 0 <= slot < n_sessions
    int32_t                  first_pos = 0;  // position of the first row
    std::span<const int32_t> tokens;         // at layer 0: n token ids ...
    std::span<const float>   residual;       // ... elsewhere: [n, n_embd]
    bool                     want_logits = false;  // at the tail: the last position's logits
};

// What a step gave: the boundary residual of every position, or at the tail the last position's logits if wanted.
struct StepOutput {
    std::vector<float> residual;  // [n, n_embd], empty at the tail
    std::vector<float> logits;    // [n_vocab], empty elsewhere
};

// A stretch of a rendered chat. own: the template put it there, so that what looks like a control token is one.
struct Segment {
    bool        own = false;
    std::string text;
};

// What rendering a chat takes: the model's template, and the texts of its control tokens as the vocabulary has them.
struct ChatFacts {
    std::string source, bos, eos;  // empty where there is none
    std::vector<std::string> controls;
};

class Stage {
  public:
    // Throws StageError: bad_model, unsupported_architecture, unproven_numerics, bad_layers, out_of_memory.
    static std::unique_ptr<Stage> open(const LoadOptions & options);
    virtual ~Stage() = default;

    virtual const Loaded & loaded() const = 0;

    // All steps share one effective range and are computed as one batch; at most one step a slot.
    // Throws StageError: bad_layers (not within the holding), cache_miss (first_pos is not where the slot ends, or its
    // positions were computed in fewer layers), context_exceeded, bad_frame (shape, token id), bad_activation (not
    // finite, or absurd), unsupported_architecture (cannot be cut there). State of every slot is untouched when it throws;
    // where the certificate says that nothing can be truncated, what failed to compute empties the slots of the batch.
    virtual std::vector<StepOutput> forward(std::span<const Step> steps, Layers effective) = 0;

    virtual int32_t used(uint32_t slot) const = 0;               // positions in the cache
    virtual void    truncate(uint32_t slot, int32_t keep) = 0;   // 0 empties it; more only where the certificate says so
    // What `to` holds becomes the first `keep` positions of `from`, with their cache: nothing is computed again.
    virtual void    fork(uint32_t from, uint32_t to, int32_t keep) = 0;

    // Needs the vocabulary only. parse_special: text such as <|im_end|> becomes its control token.
    virtual std::vector<int32_t> tokenize(std::string_view text, bool add_special, bool parse_special) const = 0;
    // A rendered chat, begun by exactly one BOS where the model wants it. Text that is not the template's never becomes a control token.
    virtual std::vector<int32_t> tokenize_chat(std::span<const Segment> segments) const = 0;
    virtual ChatFacts chat_facts() const = 0;
    virtual std::string piece(int32_t token) const = 0;  // its bytes; empty for control tokens
    virtual bool        is_end(int32_t token) const = 0;
};

}  // namespace meshnode

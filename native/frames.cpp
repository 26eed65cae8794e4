#include "frames.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

namespace meshnode {

namespace {

bool valid_utf8(std::string_view text) {
    for (size_t i = 0; i < text.size();) {
        const auto     lead = uint8_t(text[i]);
        const size_t   more = lead < 0x80 ? 0 : lead >> 5 == 6 ? 1 : lead >> 4 == 14 ? 2 : lead >> 3 == 30 ? 3 : 4;
        constexpr uint32_t least[] = {0, 0x80, 0x800, 0x10000};
        if (more == 4 || i + more >= text.size()) {
            return false;
        }
        uint32_t point = more == 0 ? lead : lead & (0x3f >> more);
        for (size_t k = 1; k <= more; ++k) {
            const auto next = uint8_t(text[i + k]);
            if (next >> 6 != 2) {
                return false;
            }
            point = point << 6 | (next & 0x3f);
        }
        if (point < least[more] || point > 0x10ffff || (point >= 0xd800 && point < 0xe000)) {
            return false;
        }
        i += more + 1;
    }
    return true;
}

// Reader and Writer visit the same list of fields, so the two directions cannot differ.
class Reader {
  public:
    static constexpr bool reading = true;

    explicit Reader(std::span<const std::byte> body) : rest_(body) {}

    template <class T>
        requires(std::is_arithmetic_v<T> && !std::is_same_v<T, bool>)
    void operator()(T & value) {
        std::memcpy(&value, take(sizeof(T)).data(), sizeof(T));
    }

    void operator()(bool & value) {
        uint8_t byte = 0;
        (*this)(byte);
        require(byte <= 1, "a flag is neither 0 nor 1");
        value = byte;
    }

    void operator()(std::string & value) {
        const auto bytes = take(count(1));
        value.assign(reinterpret_cast<const char *>(bytes.data()), bytes.size());
    }

    void text(std::string & value) {
        (*this)(value);
        require(valid_utf8(value), "text is not UTF-8");
    }

    // least: bytes that an item takes at the least, so that a count can be refused before anything is allocated.
    template <class T, class F> void array(std::vector<T> & items, size_t least, F && each) {
        items.resize(count(least));
        for (T & item : items) {
            each(item);
        }
    }

    template <class T> void view(std::span<const T> & items) {
        const size_t n = count(sizeof(T));
        items = {reinterpret_cast<const T *>(take(n * sizeof(T)).data()), n};
    }

    void zeros(size_t n) {
        for (std::byte b : take(n)) {
            require(b == std::byte{0}, "a reserved field is not 0");
        }
    }

    void require(bool holds, const char * what) {
        if (!holds) {
            throw BadFrame(what);
        }
    }

    void end() { require(rest_.empty(), "bytes follow the last field"); }

  private:
    std::span<const std::byte> take(size_t n) {
        require(n <= rest_.size(), "the body ends within a field");
        const auto taken = rest_.first(n);
        rest_ = rest_.subspan(n);
        return taken;
    }

    size_t count(size_t least) {
        uint32_t n = 0;
        (*this)(n);
        require(n <= rest_.size() / least, "a count is larger than the body");
        return n;
    }

    std::span<const std::byte> rest_;
};

class Writer {
  public:
    static constexpr bool reading = false;

    explicit Writer(std::vector<std::byte> & out) : out_(out) {}

    template <class T>
        requires std::is_arithmetic_v<T>
    void operator()(const T & value) {
        put(&value, sizeof(T));
    }

    void operator()(const std::string & value) {
        (*this)(uint32_t(value.size()));
        put(value.data(), value.size());
    }

    void text(const std::string & value) { (*this)(value); }

    template <class T, class F> void array(const std::vector<T> & items, size_t, F && each) {
        (*this)(uint32_t(items.size()));
        for (const T & item : items) {
            each(const_cast<T &>(item));
        }
    }

    template <class T> void view(const std::span<const T> & items) {
        (*this)(uint32_t(items.size()));
        put(items.data(), items.size_bytes());
    }

    void zeros(size_t n) { out_.resize(out_.size() + n); }
    void require(bool, const char *) {}

  private:
    void put(const void * data, size_t n) {
        const auto * bytes = static_cast<const std::byte *>(data);
        out_.insert(out_.end(), bytes, bytes + n);
    }

    std::vector<std::byte> & out_;
};

template <class A> void fields(A & ar, Layers & m) {
    ar(m.begin), ar(m.end);
}

template <class A> void fields(A & ar, Load & m) {
    auto numerics = uint8_t(m.numerics);
    ar.array(m.files, sizeof(uint32_t) + 5 * sizeof(uint64_t), [&](ModelFile & f) {
        ar.text(f.path), ar(f.device), ar(f.inode), ar(f.size), ar(f.mtime_ns), ar(f.ctime_ns);
    });
    ar.require(!m.files.empty() && m.files.size() <= kMaxFiles, "the number of files is out of range");
    fields(ar, m.layers);
    ar(m.n_sessions), ar(m.n_ctx), ar(m.max_step), ar(m.n_threads), ar(numerics);
    auto within = [](uint32_t x, uint32_t most) { return x >= 1 && x <= most; };
    ar.require(within(m.n_sessions, kMaxSessions), "n_sessions is out of range");
    ar.require(within(m.n_ctx, kMaxContext), "n_ctx is out of range");
    ar.require(within(m.max_step, kMaxStep), "max_step is out of range");
    ar.require(within(m.n_threads, kMaxThreads), "n_threads is out of range");
    ar.require(numerics <= uint8_t(Numerics::fast), "numerics is unknown");
    m.numerics = Numerics(numerics);
}

template <class A> void fields(A & ar, Sampling & s) {
    ar(s.temperature), ar(s.top_k), ar(s.top_p), ar(s.min_p), ar(s.repeat_penalty), ar(s.repeat_last_n);
    ar(s.presence_penalty), ar(s.frequency_penalty), ar(s.seed), ar(s.typical_p), ar(s.logprobs);
    ar.array(s.logit_bias, sizeof(int32_t) + sizeof(double), [&](auto & bias) { ar(bias.first), ar(bias.second); });
    ar.text(s.grammar);
    ar.require(s.valid(), "a sampling parameter is out of range");
}

template <class A> void fields(A & ar, Open & m) {
    ar(m.handle);
    fields(ar, m.sampling);
    ar(m.start), ar.array(m.prompt, sizeof(int32_t), ar);
}

template <class A> void fields(A & ar, Fork & m) {
    ar(m.handle), ar(m.from), ar(m.keep);
    fields(ar, m.sampling);
    ar(m.start), ar.array(m.prompt, sizeof(int32_t), ar);
}

template <class A> void fields(A & ar, Push & m) {
    uint32_t keep = kKeepAll;
    auto     input = uint8_t(m.tokens.empty());
    ar(m.handle), ar(m.first_pos);
    fields(ar, m.effective);
    ar(keep), ar(m.sample), ar(input), ar.zeros(2);
    ar.require(keep == kKeepAll, "keep is reserved");
    ar.require(input <= 1, "the kind of input is unknown");
    input == 0 ? ar.view(m.tokens) : ar.view(m.residual);
    ar.require(!m.tokens.empty() || !m.residual.empty(), "a step without positions");
}

template <class A> void fields(A & ar, Truncate & m) {
    ar(m.handle), ar(m.keep);
}

template <class A> void fields(A & ar, Close & m) {
    ar(m.handle);
}

template <class A> void fields(A & ar, Tokenize & m) {
    ar(m.chat), ar(m.add_special), ar(m.parse_special), ar.zeros(1);
    if (!m.chat) {
        return ar.text(m.text);
    }
    ar.require(!m.add_special && !m.parse_special, "flags of a text in a chat");
    ar.array(m.segments, 1 + sizeof(uint32_t), [&](Segment & segment) {
        ar(segment.own), ar.text(segment.text);
    });
    ar.require(!m.segments.empty(), "a chat without text");
}

template <class A> void fields(A &, DescribeChat &) {}

template <class A> void fields(A & ar, Pieces & m) {
    ar.array(m.ids, sizeof(int32_t), ar);
    ar.require(m.ids.size() <= kMaxPieces, "too many ids");
}

template <class A> void fields(A & ar, Hello & m) {
    ar(m.version), ar.text(m.engine);
}

template <class A> void fields(A & ar, LoadedReply & m) {
    Loaded & l = m.loaded;
    ar.text(l.architecture);
    fields(ar, l.layers);
    ar(l.n_layer), ar(l.n_embd), ar(l.n_vocab), ar(l.n_ctx_train), ar(l.n_sessions), ar(l.n_ctx), ar(l.max_step);
    ar(l.has_template), ar(l.tensor_bytes), ar(l.kv_bytes), ar.text(l.recipe), ar.text(l.fingerprint), ar.text(l.certificate);
}

template <class A> void fields(A &, Opened &) {}
template <class A> void fields(A &, Truncated &) {}
template <class A> void fields(A &, Closed &) {}
template <class A> void fields(A &, Forked &) {}

template <class A> void fields(A & ar, Sampled & m) {
    bool told = m.logprobs.has_value();
    ar(m.token), ar(m.is_end), ar(told), ar.zeros(2), ar(m.piece);
    if (!told) {
        return;
    }
    auto logprob = [&](double & value) {
        ar(value);
        ar.require(value <= 0 && std::isfinite(value), "a log-probability is out of range");
    };
    auto & l = m.logprobs ? *m.logprobs : m.logprobs.emplace();
    logprob(l.chosen);
    ar.array(l.top, 2 * sizeof(int32_t) + sizeof(double), [&](Sampled::Likely & likely) {
        ar(likely.token), logprob(likely.logprob), ar(likely.piece);
    });
    ar.require(l.top.size() <= kMaxLogprobs, "too many log-probabilities");
}

template <class A> void fields(A & ar, Stepped & m) {
    auto which = uint8_t(m.output.index());
    ar(m.compute_ns), ar(which), ar.zeros(3);
    ar.require(which <= 2, "the kind of output is unknown");
    if constexpr (A::reading) {
        if (which == 1) {
            m.output = std::span<const float>();
        } else if (which == 2) {
            m.output = Sampled();
        }
    }
    if (auto * residual = std::get_if<1>(&m.output)) {
        ar.view(*residual);
        ar.require(!residual->empty(), "a residual without positions");
    } else if (auto * sampled = std::get_if<2>(&m.output)) {
        fields(ar, *sampled);
    }
}

template <class A> void fields(A & ar, Tokens & m) {
    ar.array(m.ids, sizeof(int32_t), ar);
}

template <class A> void fields(A & ar, PieceList & m) {
    ar.array(m.pieces, sizeof(uint32_t), ar);
}

template <class A> void fields(A & ar, ChatFactsReply & m) {
    ar.text(m.facts.source), ar(m.facts.bos), ar(m.facts.eos);
    ar.array(m.facts.controls, sizeof(uint32_t), ar);
}

template <class A> void fields(A & ar, Error & m) {
    ar.text(m.code), ar.text(m.message);
}

template <class V, size_t I = 0> V decode(uint16_t kind, std::span<const std::byte> body) {
    if constexpr (I == std::variant_size_v<V>) {
        throw BadFrame("unknown kind " + std::to_string(kind));
    } else {
        using M = std::variant_alternative_t<I, V>;
        if (kind != uint16_t(M::kind)) {
            return decode<V, I + 1>(kind, body);
        }
        M      message;
        Reader reader(body);
        fields(reader, message);
        reader.end();
        return message;
    }
}

template <class V> void encode_any(std::vector<std::byte> & out, uint64_t id, const V & any) {
    out.clear();
    Writer writer(out);
    std::visit([&](const auto & message) {
        writer(uint32_t(0)), writer(uint16_t(message.kind)), writer(uint16_t(0)), writer(id);
        fields(writer, const_cast<std::remove_cvref_t<decltype(message)> &>(message));  // a Writer changes nothing
    }, any);
    const auto length = uint32_t(out.size() - kHeaderBytes);
    std::memcpy(out.data(), &length, sizeof(length));
}

// How many of n bytes came before the end.
size_t fill(const ReadSome & read, std::byte * into, size_t n) {
    size_t have = 0;
    while (have < n) {
        const size_t more = read(into + have, n - have);
        if (more == 0) {
            break;
        }
        have += more;
    }
    return have;
}

}  // namespace

uint32_t request_bound(uint64_t n_embd, uint64_t n_ctx, uint64_t max_step) {
    const uint64_t array = std::max(4 * max_step * n_embd, 4 * n_ctx);
    return uint32_t(std::min(std::max(kTextBound, array) + kSlack, kBodyCap));
}

bool read_frame(const ReadSome & read, const std::atomic<uint32_t> & bound, Frame & frame) {
    std::byte header[kHeaderBytes];
    const size_t have = fill(read, header, kHeaderBytes);
    if (have == 0) {
        return false;
    }
    if (have < kHeaderBytes) {
        throw FramingLost("the input ends within a header");
    }
    uint16_t reserved = 0;
    std::memcpy(&frame.length, header, 4);
    std::memcpy(&frame.kind, header + 4, 2);
    std::memcpy(&reserved, header + 6, 2);
    std::memcpy(&frame.id, header + 8, 8);
    if (reserved != 0) {
        throw FramingLost("the reserved field of a header is not 0");
    }
    if (frame.length > bound) {
        throw FramingLost("a body of " + std::to_string(frame.length) + " bytes is over the bound");
    }
    frame.bytes = std::make_unique_for_overwrite<std::byte[]>(frame.length);
    if (fill(read, frame.bytes.get(), frame.length) < frame.length) {
        throw FramingLost("the input ends within a body");
    }
    return true;
}

Request decode_request(uint16_t kind, std::span<const std::byte> body) {
    return decode<Request>(kind, body);
}

Reply decode_reply(uint16_t kind, std::span<const std::byte> body) {
    return decode<Reply>(kind, body);
}

void encode(std::vector<std::byte> & out, uint64_t id, const Request & request) {
    encode_any(out, id, request);
}

void encode(std::vector<std::byte> & out, uint64_t id, const Reply & reply) {
    encode_any(out, id, reply);
}

}  // namespace meshnode

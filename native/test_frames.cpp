// Holds frames and sampling against protocol/vectors/worker.json (the first argument), each frame at every byte split.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>

#include "frames.h"
#include "sample.h"
#include "test_check.h"
#include "test_json.h"

using namespace meshnode;
using Bytes = std::vector<std::byte>;

namespace {

Bytes unhex(const std::string & hex) {
    Bytes bytes;
    for (size_t i = 0; i + 1 < hex.size(); i += 2) {
        bytes.push_back(std::byte(std::stoul(hex.substr(i, 2), nullptr, 16)));
    }
    return bytes;
}

std::string hex(std::span<const std::byte> bytes) {
    std::string text;
    char digits[3];
    for (std::byte b : bytes) {
        std::snprintf(digits, sizeof(digits), "%02x", unsigned(b));
        text += digits;
    }
    return text;
}

Json range(const Layers & l) {
    return Json::array({l.begin, l.end});
}

Json biases(const Sampling & s) {
    Json all = Json::array();
    for (const auto & [token, bias] : s.logit_bias) {
        all.push_back(Json::array({token, bias}));
    }
    return all;
}

Json json(const Sampling & s) {
    return Json::object({{"temperature", s.temperature}, {"top_k", s.top_k}, {"top_p", s.top_p}, {"min_p", s.min_p},
            {"repeat_penalty", s.repeat_penalty}, {"repeat_last_n", s.repeat_last_n},
            {"presence_penalty", s.presence_penalty}, {"frequency_penalty", s.frequency_penalty}, {"seed", s.seed},
            {"typical_p", s.typical_p}, {"logprobs", s.logprobs == kNoLogprobs ? Json() : Json(s.logprobs)},
            {"logit_bias", biases(s)}, {"grammar", s.grammar}});
}

Sampling sampling(const Json & j) {
    Sampling s{j["temperature"].number(), uint32_t(j["top_k"].whole()), j["top_p"].number(), j["min_p"].number(),
               j["repeat_penalty"].number(), uint32_t(j["repeat_last_n"].whole()), j["presence_penalty"].number(),
               j["frequency_penalty"].number(), j["seed"].whole(), j["typical_p"].number(), {}, kNoLogprobs, {}};
    for (const Json & bias : j["logit_bias"].items()) {
        s.logit_bias.emplace_back(int32_t(bias.items()[0].number()), bias.items()[1].number());
    }
    return s;
}

// What each message says, as the vectors write it.
Json json(const Load & m) {
    Json files = Json::array();
    for (const ModelFile & f : m.files) {
        files.push_back(Json::object({{"path", f.path}, {"device", f.device}, {"inode", f.inode}, {"size", f.size},
                {"mtime_ns", f.mtime_ns}, {"ctime_ns", f.ctime_ns}}));
    }
    return Json::object({{"files", files}, {"layers", range(m.layers)}, {"n_sessions", m.n_sessions}, {"n_ctx", m.n_ctx},
            {"max_step", m.max_step}, {"n_threads", m.n_threads}, {"numerics", uint8_t(m.numerics)}});
}

Json json(const Open & m) {
    return Json::object({{"handle", m.handle}, {"sampling", json(m.sampling)}, {"start", m.start}, {"prompt", m.prompt}});
}

Json json(const Fork & m) {
    return Json::object({{"handle", m.handle}, {"origin", m.from}, {"keep", m.keep}, {"sampling", json(m.sampling)},
            {"start", m.start}, {"prompt", m.prompt}});
}

Json json(const Forked &) {
    return Json::object();
}

Json json(const Push & m) {
    Json j = Json::object({{"handle", m.handle}, {"first_pos", m.first_pos}, {"layers", range(m.effective)}, {"sample", m.sample},
              {"tokens", nullptr}, {"residual", nullptr}});
    if (m.residual.empty()) {
        j["tokens"] = std::vector<int32_t>(m.tokens.begin(), m.tokens.end());
    } else {
        j["residual"] = hex(std::as_bytes(m.residual));
    }
    return j;
}

Json json(const Truncate & m) {
    return Json::object({{"handle", m.handle}, {"keep", m.keep}});
}

Json json(const Close & m) {
    return Json::object({{"handle", m.handle}});
}

Json json(const Tokenize & m) {
    Json j = Json::object({{"text", nullptr}, {"add_special", m.add_special}, {"parse_special", m.parse_special}, {"segments", Json::array()}});
    if (!m.chat) {
        j["text"] = m.text;
    }
    for (const Segment & segment : m.segments) {
        j["segments"].push_back(Json::array({segment.own, segment.text}));
    }
    return j;
}

Json json(const Pieces & m) {
    return Json::object({{"ids", m.ids}});
}

Json json(const DescribeChat &) {
    return Json::object();
}

Json json(const ChatFactsReply & m) {
    auto bytes = [](const std::string & s) { return hex(std::as_bytes(std::span(s))); };
    Json j = Json::object({{"source", m.facts.source}, {"bos", bytes(m.facts.bos)}, {"eos", bytes(m.facts.eos)}, {"controls", Json::array()}});
    for (const std::string & control : m.facts.controls) {
        j["controls"].push_back(bytes(control));
    }
    return j;
}

Json json(const Hello & m) {
    return Json::object({{"version", m.version}, {"engine", m.engine}});
}

Json json(const LoadedReply & m) {
    const Loaded & l = m.loaded;
    return Json::object({{"architecture", l.architecture}, {"layers", range(l.layers)}, {"n_layer", l.n_layer}, {"n_embd", l.n_embd},
            {"n_vocab", l.n_vocab}, {"n_ctx_train", l.n_ctx_train}, {"n_sessions", l.n_sessions}, {"n_ctx", l.n_ctx},
            {"max_step", l.max_step}, {"has_template", l.has_template}, {"tensor_bytes", l.tensor_bytes},
            {"kv_bytes", l.kv_bytes}, {"recipe", l.recipe}, {"fingerprint", l.fingerprint},
            {"certificate", l.certificate}});
}

Json json(const Opened &) {
    return Json::object();
}

Json json(const Truncated &) {
    return Json::object();
}

Json json(const Closed &) {
    return Json::object();
}

Json json(const Stepped & m) {
    Json j = Json::object({{"compute_ns", m.compute_ns}, {"residual", ""}, {"sampled", nullptr}});
    if (const auto * residual = std::get_if<1>(&m.output)) {
        j["residual"] = hex(std::as_bytes(*residual));
    } else if (const auto * s = std::get_if<2>(&m.output)) {
        j["sampled"] = Json::object({{"token", s->token}, {"is_end", s->is_end},
                                     {"piece", hex(std::as_bytes(std::span(s->piece)))}, {"logprob", nullptr}, {"top", Json::array()}});
        if (s->logprobs) {
            j["sampled"]["logprob"] = s->logprobs->chosen;
            for (const Sampled::Likely & l : s->logprobs->top) {
                j["sampled"]["top"].push_back(Json::array({l.token, l.logprob, hex(std::as_bytes(std::span(l.piece)))}));
            }
        }
    }
    return j;
}

Json json(const Tokens & m) {
    return Json::object({{"ids", m.ids}});
}

Json json(const PieceList & m) {
    Json j = Json::object({{"pieces", Json::array()}});
    for (const std::string & piece : m.pieces) {
        j["pieces"].push_back(hex(std::as_bytes(std::span(piece))));
    }
    return j;
}

Json json(const Error & m) {
    return Json::object({{"code", m.code}, {"message", m.message}});
}

// Gives the first bytes up to a split, the rest in a second piece; then the end.
ReadSome source(const Bytes & bytes, size_t split, size_t & at) {
    return [&bytes, split, &at](std::byte * into, size_t n) {
        const size_t stop = at < split ? split : bytes.size();
        const size_t size = std::min(n, stop - at);
        std::copy_n(bytes.begin() + std::ptrdiff_t(at), size, into);
        at += size;
        return size;
    };
}

constexpr uint16_t kFirstReply = 0x80;

template <class M> void check_message(const Json & vector, const Frame & frame, const M & any) {
    const std::string name = vector["name"].text();
    check(std::visit([](const auto & m) { return json(m); }, any) == vector["message"], name, "says something else");
    Bytes again;
    encode(again, frame.id, any);
    check(hex(again) == vector["hex"].text(), name, "is encoded otherwise");
}

void check_frame(const Json & vector) {
    const std::string name  = vector["name"].text();
    const Bytes       bytes = unhex(vector["hex"].text());
    const std::atomic<uint32_t> bound = uint32_t(bytes.size() - kHeaderBytes), less = bound - 1;
    for (size_t split = 0; split <= bytes.size(); ++split) {
        Frame  frame;
        size_t at = 0;
        const auto read = source(bytes, split, at);
        check(read_frame(read, bound, frame) && at == bytes.size(), name, "is not read whole");
        check(frame.id == vector["id"].whole(), name, "has another id");
        check(!read_frame(read, bound, frame), name, "has no clean end");

        Bytes cut(bytes.begin(), bytes.begin() + std::ptrdiff_t(split));
        at = 0;
        try {
            const bool whole = read_frame(source(cut, cut.size(), at), bound, frame);
            check(split == bytes.size() ? whole : (split == 0 && !whole), name, "is read though it is cut");
        } catch (const FramingLost &) {
            check(split > 0 && split < bytes.size(), name, "framing is lost in a whole frame");
        }
    }
    Frame  frame;
    size_t at = 0;
    read_frame(source(bytes, 0, at), bound, frame);
    try {
        if (frame.kind < kFirstReply) {
            check_message(vector, frame, decode_request(frame.kind, frame.body()));
        } else {
            check_message(vector, frame, decode_reply(frame.kind, frame.body()));
        }
    } catch (const BadFrame & e) {
        check(false, name, e.what());
    }
    for (size_t size = 0; size < frame.length; ++size) {  // a body that is cut is never a message
        auto short_body = std::make_unique_for_overwrite<std::byte[]>(size);  // of its own, so that a sanitizer sees overreads
        std::copy_n(frame.bytes.get(), size, short_body.get());
        try {
            frame.kind < kFirstReply ? void(decode_request(frame.kind, {short_body.get(), size}))
                                     : void(decode_reply(frame.kind, {short_body.get(), size}));
            check(false, name, "a cut body is taken for whole");
        } catch (const BadFrame &) {
        }
    }
    if (frame.length > 0) {
        at = 0;
        try {
            read_frame(source(bytes, 0, at), less, frame);
            check(false, name, "is read over the bound");
        } catch (const FramingLost &) {
        }
    }
}

void check_refused(const Json & vector) {
    const Bytes bytes = unhex(vector["hex"].text());
    const std::atomic<uint32_t> bound = kUnloadedBound;
    Frame  frame;
    size_t at = 0;
    check(read_frame(source(bytes, 0, at), bound, frame), vector["name"].text(), "has no sound header");
    try {
        vector["side"].text() == "request" ? void(decode_request(frame.kind, frame.body())) : void(decode_reply(frame.kind, frame.body()));
        check(false, vector["name"].text(), "is taken");
    } catch (const BadFrame &) {
    }
}

void check_lost(const Json & vector) {
    const Bytes bytes = unhex(vector["hex"].text());
    const std::atomic<uint32_t> bound = uint32_t(vector["bound"].whole());
    for (size_t split = 0; split <= bytes.size(); ++split) {
        Frame  frame;
        size_t at = 0;
        try {
            while (read_frame(source(bytes, split, at), bound, frame)) {
            }
            check(false, vector["name"].text(), "framing is not lost");
        } catch (const FramingLost &) {
        }
    }
}

// Any bytes give a message or BadFrame; with a sanitizer this shows that nothing is read beyond the body.
void check_mutations(const Json & frames) {
    uint32_t random = 1;
    for (const Json & vector : frames.items()) {
        const Bytes bytes = unhex(vector["hex"].text());
        for (int round = 0; round < 2000; ++round) {
            auto body = std::make_unique_for_overwrite<std::byte[]>(bytes.size() - kHeaderBytes);
            const size_t size = bytes.size() - kHeaderBytes;
            std::copy(bytes.begin() + kHeaderBytes, bytes.end(), body.get());
            uint16_t kind = 0;
            std::memcpy(&kind, bytes.data() + 4, 2);
            for (int flips = 0; flips < 3 && size > 0; ++flips) {
                random = random * 1664525 + 1013904223;
                body[(random >> 8) % size] = std::byte(random >> 24);
            }
            try {
                kind < kFirstReply ? void(decode_request(kind, {body.get(), size})) : void(decode_reply(kind, {body.get(), size}));
            } catch (const BadFrame &) {
            }
        }
    }
}

void check_sampling(const Json & vectors) {
    for (const Json & v : vectors["philox"].items()) {
        const auto c = v["counter"].numbers<uint32_t>(), k = v["key"].numbers<uint32_t>();
        const auto output = philox({c[0], c[1], c[2], c[3]}, {k[0], k[1]});
        check(std::ranges::equal(output, v["output"].numbers<uint32_t>()), "philox", "differs");
    }
    for (const Json & v : vectors["uniform"].items()) {
        const double expected = double(v["numerator_of_2_53"].whole()) * 0x1p-53;
        check(uniform(v["seed"].whole(), v["position"].whole()) == expected, "uniform", "differs");
    }
    for (const Json & v : vectors["sample"].items()) {
        const auto logits  = v["logits"].numbers<float>();
        const auto history = v["history"].numbers<int32_t>();
        for (const Json & at : v["tokens"].items()) {
            const int32_t token = sample(logits, history, sampling(v["sampling"]), at.items()[0].whole());
            check(uint64_t(token) == at.items()[1].whole(), v["name"].text(), "another token is sampled");
        }
    }
    for (const Json & v : vectors["logprobs"].items()) {
        const auto told = logprobs(v["logits"].numbers<float>(), int32_t(v["token"].whole()), v["count"].whole());
        const auto & expected = v["told"].items();
        check(told.size() == expected.size(), "logprobs", "are another number");
        for (size_t i = 0; i < std::min(told.size(), expected.size()); ++i) {
            check(told[i].token == int32_t(expected[i].items()[0].whole()), "logprobs", "are of another token");
            check(std::abs(told[i].value - expected[i].items()[1].number()) < 1e-11, "logprobs", "differ");
        }
    }
    const float nan = std::nanf(""), inf = INFINITY;
    for (const std::vector<float> & logits : {std::vector<float>{}, {0, nan}, {inf, 0}, {-inf, -inf}}) {
        try {
            sample(logits, {}, {}, 0);
            check(false, "logits that are not finite", "are sampled");
        } catch (const StageError & e) {
            check(e.code == "bad_activation", "logits that are not finite", "have another code");
        }
    }
    Sampling hot;
    hot.temperature = 1;
    check(sample(std::vector<float>{-inf, 0, -inf}, {}, hot, 5) == 1, "a masked logit", "is sampled");
}

}  // namespace

int main(int count, char ** arguments) {
    if (count != 2) {
        std::fprintf(stderr, "usage: test_frames protocol/vectors/worker.json\n");
        return 2;
    }
    std::ifstream file(arguments[1]);
    const Json vectors = Json::parse({std::istreambuf_iterator<char>(file), {}});
    check(vectors["version"].whole() == kWorkerVersion, "version", "is another");
    for (const Json & v : vectors["frames"].items()) {
        check_frame(v);
    }
    for (const Json & v : vectors["refused"].items()) {
        check_refused(v);
    }
    for (const Json & v : vectors["lost"].items()) {
        check_lost(v);
    }
    check_mutations(vectors["frames"]);
    check_sampling(vectors);
    std::printf("%zu frames, %zu refused, %zu lost, %zu samplings: %d failures\n", vectors["frames"].items().size(),
                vectors["refused"].items().size(), vectors["lost"].items().size(), vectors["sample"].items().size(), failures);
    return failures ? EXIT_FAILURE : EXIT_SUCCESS;
}

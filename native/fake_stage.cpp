// A toy Stage without an engine: a whole mesh can be tested in seconds, with outputs that depend on every token, every
// layer and the cache as a model's do, and do not depend on how a prompt is cut or who else is in a batch.
//
// The "model" is any file. One that begins with "meshnode-fake L E V" has L layers, E channels and V tokens; another
// has those of the environment's MESHNODE_FAKE_SHAPE="L E V", else 6 16 300. Token ids below 256 are bytes.
// MESHNODE_FAKE_TEMPLATE is its chat template; MESHNODE_FAKE_ABORT says when it aborts: load, step;
// with MESHNODE_FAKE_TAME no token makes things happen. With MESHNODE_FAKE_LOG set it logs the size of each batch.
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <thread>

#include "stage.h"

namespace meshnode {

namespace {

// Ids that make things happen in forward(), for tests of what goes wrong.
enum Special : int32_t {
    kEnd = 256, kBegin,
    kAbort = 270,  // abort()
    kSleep,        // 100 ms
    kHang,         // for ever
    kThrow,        // std::runtime_error: a bug
    kLeast,        // the smallest vocabulary
};

constexpr int kState = 8;  // channels that remember

float noise(uint32_t a, uint32_t b) {  // in [-1, 1)
    uint32_t x = a * 0x9E3779B9u ^ (b + 0x7F4A7C15u) * 0x85EBCA6Bu;
    x = (x ^ x >> 15) * 0x2C1B3C6Du;
    x = (x ^ x >> 12) * 0x297A2D39u;
    return float(int32_t(x ^ x >> 15)) * 0x1p-31f;
}

void abort_at(const std::string & when) {
    if (const char * said = std::getenv("MESHNODE_FAKE_ABORT"); said && said == when) {
        std::abort();
    }
}

class FakeStage final : public Stage {
  public:
    explicit FakeStage(const LoadOptions & o) {
        abort_at("load");
        std::ifstream file(o.paths.at(0));
        if (!file) {
            throw StageError("bad_model", "the file cannot be read");
        }
        std::string name;
        const char * shape = std::getenv("MESHNODE_FAKE_SHAPE");
        loaded_.n_layer = 6, loaded_.n_embd = 16, loaded_.n_vocab = 300;
        std::string head(128, '\0');
        file.read(head.data(), std::streamsize(head.size()));
        std::istringstream text(head);
        if (head.starts_with("meshnode-fake ")) {
            text >> name >> loaded_.n_layer >> loaded_.n_embd >> loaded_.n_vocab;
        } else if (shape) {
            std::istringstream(shape) >> loaded_.n_layer >> loaded_.n_embd >> loaded_.n_vocab;
        }
        if (loaded_.n_layer < 1 || loaded_.n_embd < kState || loaded_.n_vocab < kLeast) {
            throw StageError("bad_model", "that is no shape");
        }
        loaded_.architecture = "fake";
        loaded_.layers       = o.layers.end < 0 ? Layers{0, loaded_.n_layer} : o.layers;
        if (loaded_.layers.begin < 0 || loaded_.layers.begin >= loaded_.layers.end || loaded_.layers.end > loaded_.n_layer) {
            throw StageError("bad_layers", "the holding is not a range of the model's layers");
        }
        loaded_.n_ctx_train  = int32_t(o.n_ctx);
        loaded_.n_sessions   = o.n_sessions;
        loaded_.n_ctx        = o.n_ctx;
        loaded_.max_step     = o.max_step;
        loaded_.has_template = true;
        loaded_.tensor_bytes = uint64_t(loaded_.layers.end - loaded_.layers.begin) * 1000;
        loaded_.kv_bytes     = uint64_t(o.n_sessions) * o.n_ctx * kState * 4;
        loaded_.recipe       = o.numerics == Numerics::fast ? R"({"engine":"fake","numerics":"fast"})"
                                                            : R"({"engine":"fake","numerics":"invariant"})";
        loaded_.fingerprint  = std::string(64, o.numerics == Numerics::fast ? 'f' : 'a');
        loaded_.certificate  = R"({"invariant":true,"planes":1,"truncate":"any"})";
        slots_.resize(o.n_sessions);
    }

    const Loaded & loaded() const override { return loaded_; }

    std::vector<StepOutput> forward(std::span<const Step> steps, Layers e) override {
        abort_at("step");
        const auto n_embd = size_t(loaded_.n_embd);
        if (e.begin < loaded_.layers.begin || e.end > loaded_.layers.end || e.begin >= e.end) {
            throw StageError("bad_layers", "the effective range is not within the holding");
        }
        std::vector<size_t> sizes;
        for (const Step & step : steps) {
            sizes.push_back(check(step, e));
        }
        if (std::getenv("MESHNODE_FAKE_LOG")) {
            std::fprintf(stderr, "batch of %zu\n", steps.size());
        }
        std::vector<StepOutput> outputs;
        for (size_t i = 0; i < steps.size(); ++i) {
            const Step & step = steps[i];
            StepOutput & output = outputs.emplace_back();
            std::vector<float> x(n_embd);
            for (size_t p = 0; p < sizes[i]; ++p) {
                for (size_t c = 0; c < n_embd; ++c) {
                    x[c] = e.begin == 0 ? noise(uint32_t(step.tokens[p]), uint32_t(c)) : step.residual[p * n_embd + c];
                }
                layers(slots_[step.slot], x, e);
                if (e.end < loaded_.n_layer) {
                    output.residual.insert(output.residual.end(), x.begin(), x.end());
                }
            }
            if (step.want_logits && e.end == loaded_.n_layer) {
                output.logits.resize(size_t(loaded_.n_vocab));
                for (int32_t t = 0; t < loaded_.n_vocab; ++t) {
                    float & logit = output.logits[size_t(t)] = t >= kAbort && t < kLeast ? -100.0f : 0.0f;
                    for (int c = 0; c < kState; ++c) {
                        logit += x[size_t(c)] * noise(uint32_t(t) + 100'000, uint32_t(c));
                    }
                }
            }
        }
        return outputs;
    }

    int32_t used(uint32_t slot) const override { return int32_t(slots_.at(slot).size()); }

    void truncate(uint32_t slot, int32_t keep) override {
        if (size_t(keep) < slots_.at(slot).size()) {
            slots_[slot].resize(size_t(keep));
        }
    }

    void fork(uint32_t from, uint32_t to, int32_t keep) override {
        if (from == to || keep < 0 || keep > used(from)) {
            throw StageError("bad_frame", "a fork keeps at most what its origin holds, in another slot");
        }
        slots_.at(to).assign(slots_[from].begin(), slots_[from].begin() + keep);
    }

    std::vector<int32_t> tokenize(std::string_view text, bool add_special, bool parse_special) const override {
        std::vector<int32_t> ids;
        if (add_special) {
            ids.push_back(kBegin);
        }
        constexpr std::string_view mark = "<end>";
        while (parse_special && !tame_ && text.starts_with("<hang>")) {
            ::pause();
        }
        while (!text.empty()) {
            const bool is_mark = parse_special && text.starts_with(mark);
            ids.push_back(is_mark ? kEnd : int32_t(uint8_t(text[0])));
            text.remove_prefix(is_mark ? mark.size() : 1);
        }
        return ids;
    }

    std::vector<int32_t> tokenize_chat(std::span<const Segment> segments) const override {
        std::vector<int32_t> ids{kBegin};
        for (const Segment & segment : segments) {
            const auto more = tokenize(segment.text, false, segment.own);
            ids.insert(ids.end(), more.begin(), more.end());
        }
        return ids;
    }

    ChatFacts chat_facts() const override {
        const char * source = std::getenv("MESHNODE_FAKE_TEMPLATE");
        return {source ? source : "{% for m in messages %}{{ m.role }}: {{ m.content }}<end>{% endfor %}", "", "<end>", {"<end>"}};
    }

    std::string piece(int32_t token) const override {
        return token < 256 ? std::string(1, char(token)) : token < kLeast ? "" : "<" + std::to_string(token) + ">";
    }

    bool is_end(int32_t token) const override { return token == kEnd; }

  private:
    using Cell = std::vector<float>;  // a position's memory: [layers held, kState]

    size_t check(const Step & step, Layers e) const {
        const auto n_embd = size_t(loaded_.n_embd);
        const size_t n = e.begin == 0 ? step.tokens.size() : step.residual.size() / n_embd;
        if (n == 0 || (e.begin == 0 ? !step.residual.empty() : !step.tokens.empty() || step.residual.size() % n_embd)) {
            throw StageError("bad_frame", "the input does not fit the effective range");
        }
        if (step.first_pos != used(step.slot)) {
            throw StageError("cache_miss", "the first position is not where the cache ends");
        }
        if (size_t(step.first_pos) + n > loaded_.n_ctx) {
            throw StageError("context_exceeded", "the step does not fit the context");
        }
        for (float x : step.residual) {
            if (!(std::abs(x) < kAbsurd)) {
                throw StageError("bad_activation", "an activation is not finite, or absurd");
            }
        }
        for (int32_t t : step.tokens) {
            if (t < 0 || t >= loaded_.n_vocab) {
                throw StageError("bad_frame", "a token id is outside the vocabulary");
            }
        }
        for (int32_t t : step.tokens) {
            switch (tame_ ? 0 : t) {
                case kAbort: std::abort();
                case kSleep: std::this_thread::sleep_for(std::chrono::milliseconds(100)); break;
                case kHang: while (true) ::pause();
                case kThrow: throw std::runtime_error("a bug that was asked for");
            }
        }
        return n;
    }

    void layers(std::vector<Cell> & slot, std::vector<float> & x, Layers e) const {
        Cell cell(size_t(loaded_.layers.end - loaded_.layers.begin) * kState);
        for (int32_t l = e.begin; l < e.end; ++l) {
            const size_t at = size_t(l - loaded_.layers.begin) * kState;
            for (size_t c = 0; c < kState; ++c) {
                const float before = slot.empty() ? 0.0f : slot.back()[at + c];
                cell[at + c] = 0.5f * before + x[c];
                x[c] = 0.5f * x[(c + 1) % kState] + 0.25f * cell[at + c] + 0.5f * noise(uint32_t(l), uint32_t(c));
            }
        }
        slot.push_back(std::move(cell));
    }

    bool   tame_ = std::getenv("MESHNODE_FAKE_TAME") != nullptr;
    Loaded loaded_;
    std::vector<std::vector<Cell>> slots_;
};

}  // namespace

std::unique_ptr<Stage> Stage::open(const LoadOptions & options) {
    return std::make_unique<FakeStage>(options);
}

}  // namespace meshnode

// test_company MODEL [--prompt N] [--unproven]
//
// Under invariant numerics a session's bits depend on nothing but its tokens. A prompt is computed in chunks of 512, 256,
// 64, 7 and 1, by the whole model and by two stages, alone, beside 7 other sessions, and in one batch with them; then
// some tokens are decoded. Every residual at the border and all logits have to be those of the first run.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "stage.h"

using namespace meshnode;

namespace {

enum class Company { none, beside, batched };

constexpr uint32_t kSessions = 8, kOurs = 3;
constexpr int kChunks[]      = {512, 256, 64, 7, 1};
constexpr int kLargest       = 512;
constexpr int kDecoded       = 6;
constexpr int kWithCompany   = 64;  // chunks at most beside others: enough for every size of the cache's blocks

int32_t token_at(const Loaded & loaded, uint32_t session, int position) {
    return int32_t((uint64_t(position) * 7919 + uint64_t(session) * 104729 + 12345) % uint64_t(loaded.n_vocab));
}

struct Bits {
    std::vector<float> border;  // [positions, n_embd] of two stages
    std::vector<float> logits;  // [1 + decoded, n_vocab]
};

class Run {
  public:
    Run(std::vector<Stage *> stages, Company company) : stages_(std::move(stages)), company_(company), at_(kSessions, 0) {}

    Bits operator()(int prompt, int chunk) {
        for (Stage * stage : stages_) {
            for (uint32_t slot = 0; slot < kSessions; slot++) {
                stage->truncate(slot, 0);
            }
        }
        for (int first = 0; first < prompt; first += chunk) {
            push(std::min(chunk, prompt - first), first + chunk >= prompt);
        }
        for (int i = 0; i < kDecoded; i++) {
            push(1, true);
        }
        return std::move(bits_);
    }

  private:
    struct Piece {
        uint32_t slot;
        int      count;
        bool     logits;
    };

    void push(int count, bool logits) {
        const Piece ours{kOurs, count, logits};
        std::vector<Piece> all{ours};
        for (uint32_t slot = 0; company_ != Company::none && slot < kSessions; slot++) {
            if (slot != kOurs) {
                all.push_back({slot, 1, true});
            }
        }
        if (company_ == Company::batched) {
            return forward(all);
        }
        for (size_t i = all.size(); i-- > 0;) {  // ours comes last
            forward({&all[i], 1});
        }
    }

    void forward(std::span<const Piece> pieces) {
        std::vector<std::vector<int32_t>> tokens;
        std::vector<StepOutput> between(pieces.size());
        for (const Piece & piece : pieces) {
            auto & ids = tokens.emplace_back();
            for (int i = 0; i < piece.count; i++) {
                ids.push_back(token_at(stages_[0]->loaded(), piece.slot, at_[piece.slot] + i));
            }
        }
        for (size_t k = 0; k < stages_.size(); k++) {
            const bool last = k + 1 == stages_.size();
            std::vector<Step> steps;
            for (size_t i = 0; i < pieces.size(); i++) {
                Step step{pieces[i].slot, at_[pieces[i].slot], {}, {}, last && pieces[i].logits};
                if (k == 0) {
                    step.tokens = tokens[i];
                } else {
                    step.residual = between[i].residual;
                }
                steps.push_back(step);
            }
            std::vector<StepOutput> out = stages_[k]->forward(steps, stages_[k]->loaded().layers);
            for (size_t i = 0; i < pieces.size(); i++) {
                if (pieces[i].slot == kOurs) {
                    bits_.border.insert(bits_.border.end(), out[i].residual.begin(), out[i].residual.end());
                    bits_.logits.insert(bits_.logits.end(), out[i].logits.begin(), out[i].logits.end());
                }
            }
            between = std::move(out);
        }
        for (const Piece & piece : pieces) {
            at_[piece.slot] += piece.count;
        }
    }

    std::vector<Stage *> stages_;
    Company company_;
    std::vector<int32_t> at_;
    Bits bits_;
};

bool same(const std::vector<float> & a, const std::vector<float> & b) {
    return a.size() == b.size() && !a.empty() && std::memcmp(a.data(), b.data(), 4 * a.size()) == 0;
}

}  // namespace

int main(int argc, char ** argv) {
    LoadOptions options;
    int prompt = 520;
    for (int i = 1; i < argc; i++) {
        const std::string name = argv[i];
        if (name == "--prompt" && i + 1 < argc) {
            prompt = std::atoi(argv[++i]);
        } else if (name == "--unproven") {
            options.unproven = true;
        } else {
            options.paths = {name};
        }
    }
    if (options.paths.empty() || prompt < 1) {
        std::fprintf(stderr, "usage: test_company MODEL [--prompt N] [--unproven]\n");
        return 2;
    }
    options.n_sessions = kSessions;
    options.n_ctx      = uint32_t(prompt + kDecoded + kWithCompany);
    options.max_step   = kLargest;
    int failures = 0, comparisons = 0;
    try {
        auto opened = [&](Layers layers) {
            options.layers = layers;
            return Stage::open(options);
        };
        const auto whole = opened({0, -1});
        const int32_t n = whole->loaded().n_layer;
        const auto head = opened({0, n / 2}), tail = opened({n / 2, n});
        std::printf("%s, %d layers, %s\n", whole->loaded().architecture.c_str(), n, whole->loaded().certificate.c_str());
        auto check = [&](bool holds, int chunk, const char * company, const char * what) {
            comparisons++;
            failures += !holds;
            if (!holds) {
                std::printf("FAIL chunk %d, %s: %s\n", chunk, company, what);
            }
        };
        std::map<int, std::pair<Bits, Bits>> alone;  // by length: of the whole, of two stages
        for (const int & chunk : kChunks) {
            if (&chunk + 1 < std::end(kChunks) && *(&chunk + 1) >= prompt) {
                continue;  // the next smaller one takes the prompt at once as well
            }
            for (const auto & [company, name] : {std::pair(Company::none, "alone"), std::pair(Company::beside, "beside"),
                                                 std::pair(Company::batched, "batched")}) {
                const int length = company == Company::none ? prompt : std::min(prompt, kWithCompany * chunk);
                // What a run has to equal is that of one chunk, alone, over as many positions.
                if (!alone.contains(length)) {
                    alone[length] = {Run({whole.get()}, Company::none)(length, kLargest),
                                     Run({head.get(), tail.get()}, Company::none)(length, kLargest)};
                    check(same(alone[length].first.logits, alone[length].second.logits), kLargest, "alone", "two stages");
                }
                const auto & [expected, border] = alone[length];
                const Bits one      = Run({whole.get()}, company)(length, chunk);
                const Bits two      = Run({head.get(), tail.get()}, company)(length, chunk);
                check(same(expected.logits, one.logits), chunk, name, "the logits of the whole");
                check(same(expected.logits, two.logits), chunk, name, "the logits of two stages");
                check(same(border.border, two.border), chunk, name, "the residuals at the border");
            }
        }
    } catch (const StageError & error) {
        std::printf("FAIL %s: %s\n", error.code.c_str(), error.what());
        failures++;
    }
    std::printf("%s: %d comparisons, %d differ\n", failures ? "FAIL" : "ok", comparisons, failures);
    return failures ? 1 : 0;
}

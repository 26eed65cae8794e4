// Which token comes next: a pure function, so that another tail that is given the history continues the same text.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "grammar.h"

namespace meshnode {

constexpr size_t  kMaxBiases   = 1024;
constexpr uint8_t kMaxLogprobs = 20;
constexpr uint8_t kNoLogprobs  = 255;

// Every parameter is at its neutral value by default: greedy, nothing filtered, nothing penalised.
struct Sampling {
    double   temperature       = 0;   // 0: the highest logit, the lowest id among equals
    uint32_t top_k             = 0;   // 0: off
    double   top_p             = 1;
    double   min_p             = 0;
    double   repeat_penalty    = 1;
    uint32_t repeat_last_n     = 64;  // the window of all three penalties; 0: none, 2^32 - 1: the whole history
    double   presence_penalty  = 0;
    double   frequency_penalty = 0;
    uint64_t seed              = 0;
    double   typical_p         = 1;
    std::vector<std::pair<int32_t, double>> logit_bias;  // by id, ascending
    uint8_t  logprobs          = kNoLogprobs;  // how many of the likeliest are told, beside the chosen one
    std::string grammar;  // GBNF; none when empty

    bool valid() const;
};

// Philox4x32-10 (Salmon et al., 2011).
std::array<uint32_t, 4> philox(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

// In [0, 1), of 53 bits, the same for the same arguments everywhere.
double uniform(uint64_t seed, uint64_t position);

// logits: [n_vocab], one per id; history: every token before position; matcher: at the end of the generated text.
// In the order: biases, penalties, grammar, top_k, typical_p, top_p, min_p, temperature. Throws StageError:
// bad_activation when a logit is NaN or +inf, or all are -inf; bad_grammar when no token can come next, or as Matcher.
int32_t sample(std::span<const float> logits, std::span<const int32_t> history, const Sampling & sampling,
               uint64_t position, Matcher * matcher = nullptr);

struct Logprob {
    int32_t token = 0;
    double  value = 0;  // natural logarithm of its probability, finite
};

// Of the model's own distribution, whatever is biased, penalised, filtered or tempered: token's, then those of the
// `count` likeliest, likeliest first, the lowest id among equals, without the impossible.
std::vector<Logprob> logprobs(std::span<const float> logits, int32_t token, size_t count);

}  // namespace meshnode

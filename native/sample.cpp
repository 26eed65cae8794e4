#include "sample.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <unordered_map>
#include <vector>

#include "stage.h"

namespace meshnode {

namespace {

struct Candidate {
    int32_t id;
    double  logit;
};

// A total order: equal logits are told apart by id, so no result depends on how a sort treats equals.
bool better(const Candidate & a, const Candidate & b) {
    return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}

bool by_id(const Candidate & a, const Candidate & b) {
    return a.id < b.id;
}

bool has_penalties(const Sampling & s) {
    return s.repeat_penalty != 1 || s.presence_penalty != 0 || s.frequency_penalty != 0;
}

// The first of the highest logits. In lanes, which the compiler computes side by side: a vocabulary has 10^5 tokens.
Candidate highest(std::span<const float> logits) {
    constexpr size_t kLanes = 16;
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    float most[kLanes];
    int32_t wrong[kLanes] = {};
    std::fill(std::begin(most), std::end(most), -kInfinity);
    const size_t whole = logits.size() / kLanes * kLanes;
    for (size_t i = 0; i < whole; i += kLanes) {
        for (size_t k = 0; k < kLanes; ++k) {
            const float x = logits[i + k];
            most[k] = x > most[k] ? x : most[k];
            wrong[k] |= !(x < kInfinity);  // also when it is no number
        }
    }
    float best = *std::max_element(std::begin(most), std::end(most));
    for (size_t i = whole; i < logits.size(); ++i) {
        wrong[0] |= !(logits[i] < kInfinity);
        best = std::max(best, logits[i]);
    }
    if (std::any_of(std::begin(wrong), std::end(wrong), [](int32_t any) { return any != 0; })) {
        throw StageError("bad_activation", "a logit is not finite");
    }
    return {int32_t(std::find(logits.begin(), logits.end(), best) - logits.begin()), double(best)};
}

std::vector<Candidate> penalised(std::span<const float> logits, std::span<const int32_t> history, const Sampling & s) {
    std::vector<Candidate> all(logits.size());
    for (size_t i = 0; i < logits.size(); ++i) {
        if (std::isnan(logits[i]) || logits[i] == std::numeric_limits<float>::infinity()) {
            throw StageError("bad_activation", "a logit is not finite");
        }
        all[i] = {int32_t(i), double(logits[i])};
    }
    for (const auto & [token, bias] : s.logit_bias) {
        if (token >= 0 && size_t(token) < all.size()) {
            all[size_t(token)].logit += bias;
        }
    }
    if (!has_penalties(s)) {
        return all;
    }
    std::unordered_map<int32_t, uint32_t> counts;
    for (int32_t token : history.last(std::min<size_t>(history.size(), s.repeat_last_n))) {
        ++counts[token];
    }
    for (const auto & [token, count] : counts) {
        if (token < 0 || size_t(token) >= all.size()) {
            continue;
        }
        double & logit = all[token].logit;
        logit = logit > 0 ? logit / s.repeat_penalty : logit * s.repeat_penalty;
        logit -= s.presence_penalty + count * s.frequency_penalty;
    }
    return all;
}

// The smallest prefix of the candidates, best first, that holds top_p of their probability; put in order of id again.
void keep_nucleus(std::vector<Candidate> & kept, double best, double top_p) {
    double total = 0;
    for (const Candidate & c : kept) {
        total += std::exp(c.logit - best);
    }
    // Sorted in growing pieces: a nucleus is mostly a few tokens of a vocabulary of 10^5.
    size_t sorted = 0, count = 0;
    double mass = 0;
    while (count < kept.size() && (count == 0 || mass < top_p * total)) {
        if (count == sorted) {
            sorted = std::min(kept.size(), std::max<size_t>(128, 8 * sorted));
            std::partial_sort(kept.begin() + count, kept.begin() + sorted, kept.end(), better);
        }
        mass += std::exp(kept[count++].logit - best);
    }
    kept.resize(count);
    std::sort(kept.begin(), kept.end(), by_id);
}

// The shortest prefix of the candidates, those first whose surprise is nearest to the expected one, that holds
// typical_p of their probability; put in order of id again (Meister et al., 2022).
void keep_typical(std::vector<Candidate> & kept, double best, double typical_p) {
    double total = 0, expected = 0;
    for (const Candidate & c : kept) {
        total += std::exp(c.logit - best);
    }
    for (const Candidate & c : kept) {
        const double p = std::exp(c.logit - best) / total;
        expected -= p > 0 ? p * (c.logit - best - std::log(total)) : 0;
    }
    auto distance = [&](const Candidate & c) { return std::abs(c.logit - best - std::log(total) + expected); };
    std::vector<std::pair<double, Candidate>> order;
    for (const Candidate & c : kept) {
        order.emplace_back(distance(c), c);
    }
    std::sort(order.begin(), order.end(), [](const auto & a, const auto & b) {
        return a.first != b.first ? a.first < b.first : better(a.second, b.second);
    });
    double mass = 0;
    kept.clear();
    for (size_t i = 0; i < order.size() && (i == 0 || mass < typical_p * total); ++i) {
        kept.push_back(order[i].second);
        mass += std::exp(order[i].second.logit - best);
    }
    std::sort(kept.begin(), kept.end(), by_id);
}

}  // namespace

bool Sampling::valid() const {
    constexpr double kLargest = 1e6;  // far beyond use; keeps every product finite
    auto within = [](double x, double low, double high) { return x >= low && x <= high; };  // false for NaN
    for (size_t i = 0; i < logit_bias.size(); ++i) {
        const auto & [token, bias] = logit_bias[i];
        if (token < 0 || !within(bias, -kLargest, kLargest) || (i > 0 && logit_bias[i - 1].first >= token)) {
            return false;
        }
    }
    return logit_bias.size() <= kMaxBiases && (logprobs <= kMaxLogprobs || logprobs == kNoLogprobs) &&
           typical_p > 0 && within(typical_p, 0, 1) && grammar.size() <= kMaxGrammarBytes && within(temperature, 0, kLargest) && top_p > 0 && within(top_p, 0, 1) && within(min_p, 0, 1) &&
           repeat_penalty > 0 && within(repeat_penalty, 0, kLargest) &&
           within(presence_penalty, -kLargest, kLargest) && within(frequency_penalty, -kLargest, kLargest);
}

std::array<uint32_t, 4> philox(std::array<uint32_t, 4> c, std::array<uint32_t, 2> key) {
    for (int round = 0; round < 10; ++round) {
        const uint64_t a = uint64_t(0xD2511F53) * c[0], b = uint64_t(0xCD9E8D57) * c[2];
        c = {uint32_t(b >> 32) ^ c[1] ^ key[0], uint32_t(b), uint32_t(a >> 32) ^ c[3] ^ key[1], uint32_t(a)};
        key = {key[0] + 0x9E3779B9, key[1] + 0xBB67AE85};
    }
    return c;
}

double uniform(uint64_t seed, uint64_t position) {
    const auto x = philox({uint32_t(position), uint32_t(position >> 32), 0, 0}, {uint32_t(seed), uint32_t(seed >> 32)});
    return double((uint64_t(x[1]) << 32 | x[0]) >> 11) * 0x1p-53;
}

int32_t sample(std::span<const float> logits, std::span<const int32_t> history, const Sampling & s, uint64_t position,
               Matcher * matcher) {
    if (s.temperature == 0 && !matcher && !has_penalties(s) && s.logit_bias.empty()) {
        const Candidate best = highest(logits);
        if (!std::isfinite(best.logit)) {
            throw StageError("bad_activation", "no logit is finite");
        }
        return best.id;
    }
    std::vector<Candidate> kept = penalised(logits, history, s);
    if (kept.empty()) {
        throw StageError("bad_activation", "there are no logits");
    }
    Candidate best = *std::min_element(kept.begin(), kept.end(), better);
    // Mostly the best one may come next, and greedy then needs to know of no other.
    if (matcher && !(s.temperature == 0 && std::isfinite(best.logit) && matcher->allows(best.id))) {
        const std::vector<bool> allowed = matcher->allowed();
        std::erase_if(kept, [&](const Candidate & c) { return size_t(c.id) >= allowed.size() || !allowed[size_t(c.id)]; });
        if (kept.empty()) {
            throw StageError("bad_grammar", "no token of the model can come next in the grammar");
        }
        best = *std::min_element(kept.begin(), kept.end(), better);
    }
    if (!std::isfinite(best.logit)) {
        throw StageError("bad_activation", "no logit is finite");
    }
    if (s.temperature == 0) {
        return best.id;
    }
    if (s.top_k > 0 && s.top_k < kept.size()) {
        std::nth_element(kept.begin(), kept.begin() + s.top_k, kept.end(), better);
        kept.resize(s.top_k);
        std::sort(kept.begin(), kept.end(), by_id);
    }
    if (s.typical_p < 1) {
        keep_typical(kept, best.logit, s.typical_p);
        best = *std::min_element(kept.begin(), kept.end(), better);  // it may have been too likely to be typical
    }
    if (s.top_p < 1) {
        keep_nucleus(kept, best.logit, s.top_p);
    }
    if (s.min_p > 0) {
        std::erase_if(kept, [&](const Candidate & c) { return std::exp(c.logit - best.logit) < s.min_p; });
    }
    // Summed and drawn in order of id: a fixed order that needs no sort when nothing is filtered.
    double total = 0;
    for (Candidate & c : kept) {
        c.logit = std::exp((c.logit - best.logit) / s.temperature);
        total += c.logit;
    }
    const double target = uniform(s.seed, position) * total;
    double sum = 0;
    for (const Candidate & c : kept) {
        sum += c.logit;
        if (sum > target) {
            return c.id;
        }
    }
    return best.id;  // only by rounding at the very end of the sum
}

std::vector<Logprob> logprobs(std::span<const float> logits, int32_t token, size_t count) {
    std::vector<Candidate> top;
    for (size_t i = 0; i < logits.size(); ++i) {
        if (std::isfinite(logits[i])) {
            top.push_back({int32_t(i), double(logits[i])});
        }
    }
    double most = -std::numeric_limits<double>::infinity(), total = 0;
    for (const Candidate & c : top) {
        most = std::max(most, c.logit);
    }
    for (const Candidate & c : top) {
        total += std::exp(c.logit - most);
    }
    const double all = most + std::log(total);
    std::vector<Logprob> out{{token, std::min(double(logits[size_t(token)]) - all, 0.0)}};
    count = std::min(count, top.size());
    std::partial_sort(top.begin(), top.begin() + std::ptrdiff_t(count), top.end(), better);
    for (size_t i = 0; i < count; ++i) {
        out.push_back({top[i].id, std::min(top[i].logit - all, 0.0)});
    }
    return out;
}

}  // namespace meshnode

// test_probe
//
// The fingerprint says the same of the same build, and another thing of every switch that changes bits. No model.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <set>
#include <string>
#include <vector>

#include "ggml-cpu.h"
#include "ggml.h"
#include "probe.h"
#include "test_check.h"

using namespace meshnode;

namespace {

std::string print(const std::set<int> & types, bool invariant, bool repack, bool flash) {
    ggml_cpu_set_batch_invariant(invariant);
    return fingerprint(types, {invariant ? Numerics::invariant : Numerics::fast, "f16", repack, flash, "", "cpu"});
}

double since(std::chrono::steady_clock::time_point begin) {  // ms
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
}

bool repacks() {
#if defined(__AVX2__)
    return true;
#else
    return false;
#endif
}

}  // namespace

int main() {
    std::set<int> weights;
    for (int type = 0; type < GGML_TYPE_COUNT; type++) {
        const auto t = ggml_type(type);
        if (t == GGML_TYPE_F32 || t == GGML_TYPE_F16 || t == GGML_TYPE_BF16 ||
            (ggml_is_quantized(t) && t != GGML_TYPE_Q8_1 && t != GGML_TYPE_Q8_K)) {  // those two hold activations
            weights.insert(type);
        }
    }
    const auto begin = std::chrono::steady_clock::now();
    const std::string usual = print(weights, true, false, false);
    const double ms = since(begin);
    std::set<std::string> seen{usual};
    check(print(weights, true, false, false) == usual, "the same twice");
    check(seen.insert(print(weights, true, false, true)).second, "flash attention");
    check(seen.insert(print(weights, false, false, false)).second, "the invariant switch");
    if (repacks()) {
        check(seen.insert(print(weights, false, true, false)).second, "repacking");
    }
    const std::string none = print({}, true, false, false);
    double usual_ms = 0;
    for (int type : weights) {
        const auto start = std::chrono::steady_clock::now();
        const std::string one = print({GGML_TYPE_F32, type}, true, false, false);
        usual_ms = std::max(usual_ms, since(start));
        check(one != none && print({type}, true, false, false) != none,
              std::string("weights of ") + ggml_type_name(ggml_type(type)) + " are a part of it");
    }
    std::printf("%zu types in %.1f ms, F32 and another in %.1f at the most\n%s\n", weights.size(), ms, usual_ms, failures ? "FAIL" : "ok");
    return failures ? 1 : 0;
}

// greedy MODEL invariant|fast COUNT < prompts
//
// For each line of stdin, the token ids of a prompt: the COUNT most likely tokens that follow, one after another, and
// a hash of all logits. Whole range, one session. parity_upstream prints the same with the engine as it is upstream.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>

#include "sha256.h"
#include "stage.h"

using namespace meshnode;

int main(int argc, char ** argv) {
    if (argc != 4) {
        std::fprintf(stderr, "usage: greedy MODEL invariant|fast COUNT < prompts\n");
        return 2;
    }
    try {
        LoadOptions options;
        options.paths       = {argv[1]};
        options.layers     = {0, -1};
        options.n_sessions = 1;
        options.n_ctx      = 1024;
        options.max_step   = 64;
        options.n_threads  = 2;
        options.numerics   = std::string(argv[2]) == "fast" ? Numerics::fast : Numerics::invariant;
        auto stage = Stage::open(options);
        for (std::string line; std::getline(std::cin, line);) {
            std::istringstream in(line);
            std::vector<int32_t> next;
            for (int32_t id; in >> id;) {
                next.push_back(id);
            }
            stage->truncate(0, 0);
            Sha256 hash;
            for (int k = 0; k < std::atoi(argv[3]); k++) {
                std::vector<float> logits;
                while (!next.empty()) {
                    const size_t n = std::min<size_t>(next.size(), options.max_step);
                    Step step;
                    step.first_pos   = stage->used(0);
                    step.tokens      = std::span(next).first(n);
                    step.want_logits = n == next.size();
                    logits = stage->forward(std::span(&step, 1), stage->loaded().layers)[0].logits;
                    next.erase(next.begin(), next.begin() + std::ptrdiff_t(n));
                }
                hash.update(logits.data(), logits.size() * sizeof(float));
                next = {int32_t(std::max_element(logits.begin(), logits.end()) - logits.begin())};
                std::printf("%d ", next[0]);
            }
            std::printf("%s\n", hash.hex().c_str());
        }
    } catch (const StageError & error) {
        std::printf("FAIL %s: %s\n", error.code.c_str(), error.what());
        return 1;
    }
}

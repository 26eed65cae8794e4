// Random sets of sessions that run, fill and end: after the patience they sit side by side, nobody's content is lost.
#include <cstdio>
#include <numeric>
#include <random>

#include "places.h"

using namespace meshnode;

int main() {
    int failures = 0;
    auto check = [&](bool holds, const char * what, uint32_t seed) {
        if (!holds) {
            failures++;
            std::printf("FAIL %s (seed %u)\n", what, seed);
        }
    };
    for (uint32_t seed = 0; seed < 300; seed++) {
        std::mt19937 random(seed);
        const uint32_t n = 2 + random() % 17, spare = seed % 2;
        Places places(n, n + spare);
        std::vector<bool> filled(n);
        std::vector<int> content(n + spare, -1);  // of a stream: whose
        for (int turn = 0; turn < 12; turn++) {
            for (uint32_t slot = 0; slot < n; slot++) {
                const bool now = random() % 4 != 0;
                if (now != filled[slot]) {
                    filled[slot] = now;
                    content[places.stream(slot)] = now ? int(slot) : -1;
                }
            }
            std::vector<uint32_t> slots(n);
            std::iota(slots.begin(), slots.end(), 0);
            std::shuffle(slots.begin(), slots.end(), random);
            slots.resize(1 + random() % n);
            const bool room = spare || std::count(filled.begin(), filled.end(), false) > 0;
            for (int batch = 0; batch < 300; batch++) {
                for (const Places::Move & move : places.arrange(slots, filled)) {
                    content[move.to] = content[move.from];
                    content[move.from] = -1;
                }
            }
            std::vector<uint32_t> at, all;
            for (uint32_t slot = 0; slot < n; slot++) {
                all.push_back(places.stream(slot));
                check(!filled[slot] || content[places.stream(slot)] == int(slot), "content is where its slot is", seed);
            }
            for (uint32_t slot : slots) {
                at.push_back(places.stream(slot));
            }
            std::sort(all.begin(), all.end());
            check(std::adjacent_find(all.begin(), all.end()) == all.end(), "a stream has one slot", seed);
            const auto [least, most] = std::minmax_element(at.begin(), at.end());
            check(!spare || !room || *most - *least + 1 == at.size(), "what runs together sits side by side", seed);
        }
    }
    std::printf("%s\n", failures ? "FAIL" : "ok");
    return failures ? 1 : 0;
}

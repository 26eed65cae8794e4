// Where sessions live: the engine computes only neighbouring KV streams together, so what runs together has to sit
// side by side. Pure; stage.cpp copies what this says.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

namespace meshnode {

class Places {
  public:
    struct Move {  // of a stream's whole content; from is free afterwards
        uint32_t from, to;
    };

    // n_streams >= n_slots; one more lets two full streams change places.
    Places(uint32_t n_slots, uint32_t n_streams) : stream_of_(n_slots), slot_at_(n_streams, kNobody) {
        for (uint32_t slot = 0; slot < n_slots; slot++) {
            stream_of_[slot] = slot_at_[slot] = slot;
        }
    }

    uint32_t stream(uint32_t slot) const { return stream_of_[slot]; }

    // Copies that put the slots of a batch side by side, to be done in order. None when they are, and none until
    // batches were scattered for a while: a copy costs about what a step does, and pays only if more like it follow.
    // filled[slot]: whether the slot's content has to be kept.
    std::vector<Move> arrange(std::span<const uint32_t> active, const std::vector<bool> & filled) {
        if (active.size() < 2 || adjacent(active)) {
            calm_++;
            return {};
        }
        if (++scattered_ < patience_) {
            return {};
        }
        // Sets of sessions that take turns shall not chase each other.
        patience_  = calm_ < kCalm ? std::min(2 * patience_, kMostPatience) : kLeastPatience;
        scattered_ = calm_ = 0;
        return gather(active, filled);
    }

  private:
    static constexpr uint32_t kNobody = UINT32_MAX;
    static constexpr uint32_t kLeastPatience = 2, kMostPatience = 256, kCalm = 16;  // batches

    bool adjacent(std::span<const uint32_t> active) const {
        auto [least, most] = std::minmax_element(active.begin(), active.end(), [&](uint32_t a, uint32_t b) {
            return stream_of_[a] < stream_of_[b];
        });
        return stream_of_[*most] - stream_of_[*least] + 1 == active.size();
    }

    std::vector<Move> gather(std::span<const uint32_t> active, const std::vector<bool> & filled) {
        std::vector<bool> runs(slot_at_.size(), false);  // by stream
        for (uint32_t slot : active) {
            runs[stream_of_[slot]] = true;
        }
        const size_t width = active.size();
        size_t begin = 0, most = 0;  // of the window that holds most of them already
        for (size_t at = 0; at + width <= runs.size(); at++) {
            const auto here = size_t(std::count(runs.begin() + long(at), runs.begin() + long(at + width), true));
            if (here > most) {
                begin = at, most = here;
            }
        }
        auto keeps = [&](uint32_t stream) { return slot_at_[stream] != kNobody && filled[slot_at_[stream]]; };
        auto inside = [&](size_t stream) { return stream >= begin && stream < begin + width; };

        std::vector<Move> moves;
        auto move = [&](uint32_t from, uint32_t to) {  // who is at `to` has nothing to keep and goes to `from`
            if (keeps(from)) {
                moves.push_back({from, to});
            }
            std::swap(slot_at_[from], slot_at_[to]);
            for (uint32_t stream : {from, to}) {
                if (slot_at_[stream] != kNobody) {
                    stream_of_[slot_at_[stream]] = stream;
                }
            }
            runs[to]   = runs[from];
            runs[from] = false;
        };
        auto free_stream = [&](bool within) {  // of nobody's content, kNobody if there is none
            uint32_t at = 0;
            while (at < runs.size() && (inside(at) != within || runs[at] || keeps(at))) {
                at++;
            }
            return at < runs.size() ? at : kNobody;
        };
        for (uint32_t slot : active) {
            const uint32_t from = stream_of_[slot];
            if (inside(from)) {
                continue;
            }
            uint32_t to = free_stream(true);
            if (to == kNobody) {
                const uint32_t refuge = free_stream(false);
                if (refuge == kNobody) {
                    break;  // no room to change places: they are computed apart
                }
                to = uint32_t(std::find(runs.begin() + long(begin), runs.end(), false) - runs.begin());
                move(to, refuge);
            }
            move(from, to);
        }
        return moves;
    }

    std::vector<uint32_t> stream_of_;  // by slot
    std::vector<uint32_t> slot_at_;    // by stream
    uint32_t scattered_ = 0, calm_ = kCalm, patience_ = kLeastPatience;
};

}  // namespace meshnode

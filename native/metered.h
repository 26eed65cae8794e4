// Work that may take too long, in a process of its own that can be killed.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <vector>

namespace meshnode {

// What work gives, which is done in a fork of this process: of its threads the caller's alone goes on there, so that work
// may only read. Throws the StageError that work throws; bad_prompt when it took longer than limit, or ended the fork.
std::vector<int32_t> metered(std::chrono::milliseconds limit, const std::function<std::vector<int32_t>()> & work);

}  // namespace meshnode

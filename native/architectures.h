// The architectures that the engine is proven to cut at any layer, with bits equal to those of the whole model.
// Whatever is not listed is refused by name.
#pragma once

#include <algorithm>
#include <array>
#include <string_view>

namespace meshnode {

inline constexpr std::array kArchitectures = {
    std::string_view("llama"),
};

inline bool architecture_is_proven(std::string_view name) {
    return std::find(kArchitectures.begin(), kArchitectures.end(), name) != kArchitectures.end();
}

}  // namespace meshnode

// The architectures that the engine is proven to cut at any layer, with bits equal to those of the whole model: each
// passed `test_exact --unproven` at every cut. Whatever is not listed is refused by name. Not listed although it passed:
// phi3, whose rotary factors depend on how long a context was asked for, and mixtures of experts with quantised weights.
#pragma once

#include <algorithm>
#include <array>
#include <string_view>

namespace meshnode {

inline constexpr std::array kArchitectures = {
    std::string_view("gemma"), std::string_view("gemma2"),   std::string_view("gemma3"), std::string_view("granite"),
    std::string_view("llama"), std::string_view("mistral3"), std::string_view("olmo2"),  std::string_view("qwen2"),
    std::string_view("qwen3"), std::string_view("smollm3"),
};

inline bool architecture_is_proven(std::string_view name) {
    return std::find(kArchitectures.begin(), kArchitectures.end(), name) != kArchitectures.end();
}

}  // namespace meshnode

// From a rendered chat to tokens, without a way for a message's text to become a control token.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "stage.h"

namespace meshnode {

// A control token of the vocabulary, and the text that stands for it in a template.
struct Control {
    std::string text;
    int32_t     id     = -1;
    bool        lstrip = false;  // it swallows the white space before it ...
    bool        rstrip = false;  // ... and after it
};

// The control tokens of a vocabulary, found in a text in one pass however many there are.
class Controls {
  public:
    explicit Controls(std::vector<Control> all = {});

    // The longest whose text begins text, or none.
    const Control * at(std::string_view text) const;

    std::span<const Control> all() const { return all_; }

  private:
    std::vector<Control> all_;
    std::unordered_map<std::string, size_t> by_text_;
    std::array<std::vector<size_t>, 256> lengths_;  // by first byte, longest first
};

// tokenize: tokens of text in which nothing is a control token. Stretches of text that no control token parts are
// tokenized as one, as they would be in the joint text. Without a BOS, unless the template has it.
std::vector<int32_t> chat_tokens(std::span<const Segment> segments, const Controls & controls,
                                 const std::function<std::vector<int32_t>(const std::string &)> & tokenize);

}  // namespace meshnode

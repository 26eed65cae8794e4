// From messages to tokens, without a way for a message's text to become a control token.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "stage.h"

namespace meshnode {

// A control token of the vocabulary, and the text that stands for it in a template.
struct Control {
    std::string text;
    int32_t     id       = 0;
    bool        lstrip   = false;  // it swallows the white space before it ...
    bool        rstrip   = false;  // ... and after it
};

struct ChatParts {
    // The template applied to messages, with the cue for the answer; empty if the template is not supported.
    std::function<std::string(std::span<const Message>)> apply;
    // Tokens of text in which nothing is a control token.
    std::function<std::vector<int32_t>(const std::string &)> tokenize;
    std::span<const Control> controls;  // longest text first
};

// Without a token that begins the sequence, unless the template has it. Throws StageError: no_chat_template, bad_prompt.
std::vector<int32_t> chat_tokens(std::span<const Message> messages, const ChatParts & parts);

}  // namespace meshnode

#include "chat.h"

#include <algorithm>

namespace meshnode {
namespace {

constexpr std::string_view kSpace = " \t\n\v\f\r";

std::string_view trim(std::string_view text) {
    const size_t first = text.find_first_not_of(kSpace);
    return first == text.npos ? std::string_view() : text.substr(first, text.find_last_not_of(kSpace) - first + 1);
}

// Stands in for the content of message i while the template is applied. Templates that trim a message remove the
// vertical tabs, which no template contains itself.
std::string sentinel(size_t i) {
    return "\vmeshnode-message-" + std::to_string(i) + "-\v";
}

// A stretch of the prompt: a control token, or text in which nothing is one.
struct Piece {
    std::string text;
    int32_t     control = -1;
};

void append_text(std::vector<Piece> & pieces, std::string_view text) {
    if (text.empty()) {
        return;
    }
    if (pieces.empty() || pieces.back().control >= 0) {
        pieces.emplace_back();
    }
    pieces.back().text += text;
}

// text is the template's own: what looks like a control token is one.
void append_template(std::vector<Piece> & pieces, std::string_view text, std::span<const Control> controls) {
    while (!text.empty()) {
        size_t at = text.npos;
        const Control * found = nullptr;
        for (const Control & control : controls) {
            const size_t here = text.find(control.text);
            if (here < at) {  // at one place the longest wins, it comes first
                at    = here;
                found = &control;
            }
        }
        append_text(pieces, text.substr(0, at));
        if (!found) {
            return;
        }
        if (found->lstrip && !pieces.empty() && pieces.back().control < 0) {
            std::string & before = pieces.back().text;
            before.erase(before.find_last_not_of(kSpace) + 1);
        }
        pieces.push_back({"", found->id});
        text.remove_prefix(at + found->text.size());
        if (found->rstrip) {
            text.remove_prefix(std::min(text.find_first_not_of(kSpace), text.size()));
        }
    }
}

void check_role(const std::string & role) {
    // The role is put into the template's own text, so it must not be able to carry a control token.
    const bool plain = std::all_of(role.begin(), role.end(), [](char c) { return (c >= 'a' && c <= 'z') || c == '_'; });
    if (role.empty() || role.size() > 32 || !plain) {
        throw StageError("bad_prompt", "the role of a message must be a word of lower-case letters");
    }
}

}  // namespace

std::vector<int32_t> chat_tokens(std::span<const Message> messages, const ChatParts & parts) {
    std::vector<Message> stand_ins;
    for (size_t i = 0; i < messages.size(); i++) {
        check_role(messages[i].role);
        stand_ins.push_back({messages[i].role, sentinel(i)});
    }
    const std::string prompt = parts.apply(stand_ins);
    if (prompt.empty()) {
        throw StageError("no_chat_template", "the model has no chat template that the engine knows");
    }

    std::vector<Piece> pieces;
    std::string_view rest = prompt;
    for (size_t i = 0; i < messages.size(); i++) {
        std::string_view mark = stand_ins[i].content, content = messages[i].content;
        size_t at = rest.find(mark);
        if (at == rest.npos) {
            mark    = trim(mark);
            content = trim(content);
            at      = rest.find(mark);
        }
        if (at == rest.npos) {
            throw StageError("no_chat_template", "the model's chat template leaves out or reorders messages");
        }
        append_template(pieces, rest.substr(0, at), parts.controls);
        append_text(pieces, content);
        rest.remove_prefix(at + mark.size());
    }
    append_template(pieces, rest, parts.controls);

    std::vector<int32_t> tokens;
    for (const Piece & piece : pieces) {
        if (piece.control >= 0) {
            tokens.push_back(piece.control);
        } else if (!piece.text.empty()) {
            const std::vector<int32_t> more = parts.tokenize(piece.text);
            tokens.insert(tokens.end(), more.begin(), more.end());
        }
    }
    return tokens;
}

}  // namespace meshnode

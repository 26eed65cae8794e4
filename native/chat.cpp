#include "chat.h"

#include <algorithm>

namespace meshnode {
namespace {

constexpr std::string_view kSpace = " \t\n\v\f\r";

// A stretch of the prompt: a control token, or text in which nothing is one.
struct Piece {
    std::string     text;
    const Control * control = nullptr;
};

void append_text(std::vector<Piece> & pieces, std::string_view text) {
    if (!pieces.empty() && pieces.back().control && pieces.back().control->rstrip) {
        text.remove_prefix(std::min(text.find_first_not_of(kSpace), text.size()));
    }
    if (text.empty()) {
        return;
    }
    if (pieces.empty() || pieces.back().control) {
        pieces.emplace_back();
    }
    pieces.back().text += text;
}

void append_control(std::vector<Piece> & pieces, const Control & control) {
    if (control.lstrip && !pieces.empty() && !pieces.back().control) {
        std::string & before = pieces.back().text;
        before.erase(before.find_last_not_of(kSpace) + 1);
    }
    pieces.push_back({"", &control});
}

// text is the template's own: what looks like a control token is one.
void append_own(std::vector<Piece> & pieces, std::string_view text, const Controls & controls) {
    size_t begin = 0;
    for (size_t at = 0; at < text.size();) {
        const Control * control = controls.at(text.substr(at));
        if (!control) {
            at++;
            continue;
        }
        append_text(pieces, text.substr(begin, at - begin));
        append_control(pieces, *control);
        at += control->text.size();
        begin = at;
    }
    append_text(pieces, text.substr(begin));
}

}  // namespace

Controls::Controls(std::vector<Control> all) : all_(std::move(all)) {
    for (size_t i = 0; i < all_.size(); i++) {
        const std::string & text = all_[i].text;
        if (!text.empty() && by_text_.emplace(text, i).second) {
            lengths_[uint8_t(text[0])].push_back(text.size());
        }
    }
    for (std::vector<size_t> & lengths : lengths_) {
        std::sort(lengths.begin(), lengths.end(), std::greater<>());
        lengths.erase(std::unique(lengths.begin(), lengths.end()), lengths.end());
    }
}

const Control * Controls::at(std::string_view text) const {
    for (const size_t length : lengths_[uint8_t(text[0])]) {
        if (length <= text.size()) {
            if (const auto found = by_text_.find(std::string(text.substr(0, length))); found != by_text_.end()) {
                return &all_[found->second];
            }
        }
    }
    return nullptr;
}

std::vector<int32_t> chat_tokens(std::span<const Segment> segments, const Controls & controls,
                                 const std::function<std::vector<int32_t>(const std::string &)> & tokenize) {
    std::vector<Piece> pieces;
    for (const Segment & segment : segments) {
        segment.own ? append_own(pieces, segment.text, controls) : append_text(pieces, segment.text);
    }
    std::vector<int32_t> tokens;
    for (const Piece & piece : pieces) {
        if (piece.control) {
            tokens.push_back(piece.control->id);
        } else if (!piece.text.empty()) {
            const std::vector<int32_t> more = tokenize(piece.text);
            tokens.insert(tokens.end(), more.begin(), more.end());
        }
    }
    return tokens;
}

}  // namespace meshnode

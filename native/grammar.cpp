#include "grammar.h"

#include <algorithm>
#include <numeric>

#include "stage.h"

namespace meshnode {

namespace {

constexpr uint32_t kLargest = 0x10ffff;  // code point

StageError bad(const std::string & what) {
    return {"bad_grammar", what};
}

bool holds(const std::vector<std::pair<uint32_t, uint32_t>> & ranges, uint32_t low, uint32_t high) {
    const auto at = std::ranges::lower_bound(ranges, low, {}, [](auto & r) { return r.second; });
    return at != ranges.end() && at->first <= high;
}

}  // namespace

// ---- reading

// Recursive descent over the text; every error names the line it is in.
class GrammarParser {
  public:
    GrammarParser(std::string_view text, Grammar & into) : text_(text), g_(into) {}

    void parse() {
        space(true);
        while (at_ < text_.size()) {
            const uint32_t rule = symbol(name());
            space(false);
            require(text_.substr(at_).starts_with("::="), "::= is missing");
            at_ += 3;
            space(true);
            if (!g_.rules_[rule].empty()) {
                throw fault("the rule '" + names_[rule] + "' is defined twice");
            }
            alternates(rule, 0);
            require(at_ == text_.size() || text_[at_] == '\n' || text_[at_] == '\r', "this cannot be read");
            space(true);
        }
        for (size_t i = 0; i < names_.size(); ++i) {
            if (g_.rules_[i].empty()) {
                throw bad("the grammar has no rule '" + names_[i] + "'");
            }
        }
        const auto root = symbols_.find("root");
        if (root == symbols_.end()) {
            throw bad("the grammar has no rule 'root'");
        }
        g_.root_ = root->second;
    }

    const std::vector<std::string> & names() const { return names_; }

  private:
    using Element  = Grammar::Element;
    using Sequence = std::vector<Element>;
    using Ranges   = Grammar::Ranges;

    StageError fault(const std::string & what) const {
        const auto line = 1 + std::count(text_.begin(), text_.begin() + std::ptrdiff_t(std::min(at_, text_.size())), '\n');
        return bad("line " + std::to_string(line) + " of the grammar: " + what);
    }

    void require(bool holds, const char * what) const {
        if (!holds) {
            throw fault(what);
        }
    }

    char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }

    bool take(char c) {
        const bool is_next = at_ < text_.size() && text_[at_] == c;
        at_ += is_next;
        return is_next;
    }

    void space(bool lines) {
        while (at_ < text_.size()) {
            const char c = text_[at_];
            if (c == '#') {
                at_ = std::min(text_.find_first_of("\r\n", at_), text_.size());
            } else if (c == ' ' || c == '\t' || (lines && (c == '\r' || c == '\n'))) {
                ++at_;
            } else {
                return;
            }
        }
    }

    static bool is_digit(char c) { return c >= '0' && c <= '9'; }
    static bool is_word(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '-' || is_digit(c); }

    std::string name() {
        const size_t begin = at_;
        while (is_word(peek())) {
            ++at_;
        }
        require(at_ > begin, "the name of a rule is missing");
        return std::string(text_.substr(begin, at_ - begin));
    }

    uint32_t symbol(const std::string & name) {
        const auto [found, is_new] = symbols_.emplace(name, uint32_t(g_.rules_.size()));
        return is_new ? rule(name) : found->second;
    }

    uint32_t rule(const std::string & name) {
        count(1);
        g_.rules_.emplace_back();
        names_.push_back(name);
        return uint32_t(g_.rules_.size() - 1);
    }

    void count(uint64_t elements) {
        left_ -= std::min(left_, elements);
        require(left_ > 0, "repetitions make the grammar too large");
    }

    void define(uint32_t rule, const std::vector<Sequence> & alternates) {
        for (const Sequence & sequence : alternates) {
            count(sequence.size() + 1);
            g_.rules_[rule].push_back(uint32_t(g_.elements_.size()));
            g_.elements_.insert(g_.elements_.end(), sequence.begin(), sequence.end());
            g_.elements_.push_back({});
        }
    }

    void alternates(uint32_t rule, uint32_t depth) {
        std::vector<Sequence> all{sequence(depth)};
        while (take('|')) {
            space(true);
            all.push_back(sequence(depth));
        }
        define(rule, all);
    }

    Sequence sequence(uint32_t depth) {
        Sequence all;
        size_t last = 0;  // where the item begins that a repetition is of
        bool   any  = false;
        for (const bool nested = depth > 0; at_ < text_.size(); space(nested)) {
            const char c = peek();
            if (c == '*' || c == '+' || c == '?' || c == '{') {
                require(any, "there is nothing to repeat");
                const auto [least, most] = times(nested);
                repeat(all, last, least, most);
                continue;
            }
            const size_t begin = all.size();
            if (c == '"') {
                literal(all);
            } else if (c == '[') {
                all.push_back(chars(set()));
            } else if (c == '.') {
                ++at_;
                all.push_back(chars({{0, kLargest}}));
            } else if (c == '(') {
                require(depth < kMaxNesting, "parentheses are nested too deeply");
                ++at_;
                space(true);
                const uint32_t group = rule("(");
                alternates(group, depth + 1);
                require(take(')'), "a parenthesis is not closed");
                all.push_back({Grammar::Is::rule, group});
            } else if (is_word(c)) {
                all.push_back({Grammar::Is::rule, symbol(name())});
            } else {
                require(c != '<' && c != '!', "tokens cannot be named in a grammar");
                break;
            }
            last = begin;
            any  = true;
        }
        return all;
    }

    static constexpr uint64_t kNoMost = UINT64_MAX;

    std::pair<uint64_t, uint64_t> times(bool nested) {
        switch (text_[at_++]) {
            case '*': return {0, kNoMost};
            case '+': return {1, kNoMost};
            case '?': return {0, 1};
        }
        auto number = [&] {
            uint64_t value = 0;
            require(is_digit(peek()), "a repetition needs a number");
            for (; is_digit(peek()); ++at_) {
                value = std::min<uint64_t>(10 * value + uint64_t(peek() - '0'), 1u << 30);
            }
            space(nested);
            return value;
        };
        space(nested);
        const uint64_t least = number();
        uint64_t most = least;
        if (take(',')) {
            space(nested);
            most = is_digit(peek()) ? number() : kNoMost;
        }
        require(take('}'), "a repetition is not closed");
        require(least <= most, "a repetition's bounds are the wrong way round");
        return {least, most};
    }

    // x{2,4} is x x (x (x |) |), and x{2,} is x x y with y = x y |
    void repeat(Sequence & all, size_t from, uint64_t least, uint64_t most) {
        const Sequence item(all.begin() + std::ptrdiff_t(from), all.end());
        const uint64_t further = most == kNoMost ? 1 : most - least;
        count((least + further) * (item.size() + 2));
        all.resize(from);
        for (uint64_t i = 0; i < least; ++i) {
            all.insert(all.end(), item.begin(), item.end());
        }
        Sequence more;
        for (uint64_t i = 0; i < further; ++i) {
            const uint32_t again = rule("repetition");
            Sequence one = item;
            if (most == kNoMost) {
                one.push_back({Grammar::Is::rule, again});
            } else {
                one.insert(one.end(), more.begin(), more.end());
            }
            define(again, {one, {}});
            more = {{Grammar::Is::rule, again}};
        }
        all.insert(all.end(), more.begin(), more.end());
    }

    Element chars(Ranges ranges) {
        const auto [found, is_new] = classes_.emplace(std::move(ranges), uint32_t(g_.classes_.size()));
        if (is_new) {
            g_.classes_.push_back(found->first);
        }
        return {Grammar::Is::chars, found->second};
    }

    void literal(Sequence & into) {
        ++at_;
        while (!take('"')) {
            const uint32_t c = character();
            into.push_back(chars({{c, c}}));
        }
    }

    Ranges set() {
        ++at_;
        const bool inverse = take('^');
        Ranges given;
        while (!take(']')) {
            const uint32_t low = character();
            uint32_t high = low;
            if (peek() == '-' && text_.substr(at_ + 1, 1) != "]") {
                ++at_;
                high = character();
                require(low <= high, "a range of characters is the wrong way round");
            }
            given.emplace_back(low, high);
        }
        std::sort(given.begin(), given.end());
        Ranges apart, others;
        uint32_t next = 0;  // first that is in neither
        for (auto [low, high] : given) {
            if (low > next) {
                others.emplace_back(next, low - 1);
            }
            if (!apart.empty() && low <= apart.back().second) {
                apart.back().second = std::max(apart.back().second, high);
            } else {
                apart.emplace_back(low, high);
            }
            next = std::max(next, high + 1);
        }
        if (next <= kLargest) {
            others.emplace_back(next, kLargest);
        }
        return inverse ? others : apart;
    }

    uint32_t hex(int digits) {
        uint32_t value = 0;
        for (int i = 0; i < digits; ++i, ++at_) {
            const char c = peek();
            const int digit = is_digit(c) ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
            require(digit >= 0, "an escape lacks hexadecimal digits");
            value = value << 4 | uint32_t(digit);
        }
        require(value <= kLargest, "an escape is beyond Unicode");
        return value;
    }

    // The text is known to be UTF-8.
    uint32_t character() {
        require(at_ < text_.size(), "it ends within a text or a set");
        const auto lead = uint8_t(text_[at_++]);
        if (lead == '\\') {
            const char c = peek();
            at_ += c != '\0';
            switch (c) {
                case 'x': return hex(2);
                case 'u': return hex(4);
                case 'U': return hex(8);
                case 't': return '\t';
                case 'r': return '\r';
                case 'n': return '\n';
                case '\\': case '"': case '[': case ']': case '-': return uint8_t(c);
            }
            throw fault("an escape is unknown");
        }
        uint32_t value = lead < 0x80 ? lead : lead < 0xe0 ? lead & 0x1f : lead < 0xf0 ? lead & 0x0f : lead & 0x07;
        for (int more = lead < 0x80 ? 0 : lead < 0xe0 ? 1 : lead < 0xf0 ? 2 : 3; more > 0 && at_ < text_.size(); --more) {
            value = value << 6 | (uint8_t(text_[at_++]) & 0x3f);
        }
        return value;
    }

    std::string_view text_;
    Grammar &        g_;
    size_t           at_   = 0;
    uint64_t         left_ = kMaxElements;
    std::vector<std::string>        names_;  // of rules; those that are made have no name of their own
    std::map<std::string, uint32_t> symbols_;
    std::map<Ranges, uint32_t>      classes_;
};

Grammar::Grammar(std::string_view gbnf) {
    if (gbnf.size() > kMaxGrammarBytes) {
        throw bad("the grammar is longer than " + std::to_string(kMaxGrammarBytes) + " bytes");
    }
    GrammarParser parser(gbnf, *this);
    parser.parse();
    refuse_left_recursion(parser.names());
}

// A rule that begins with itself, be it behind rules that may be empty, would be expanded without end.
void Grammar::refuse_left_recursion(const std::vector<std::string> & names) const {
    // Which rules may be empty: an alternate once all of its rules are.
    std::vector<bool> empty(rules_.size());
    std::vector<std::vector<uint32_t>> alternates_with(rules_.size());  // numbers of alternates, by rule in them
    std::vector<uint32_t> waits, owner, todo;
    auto found_empty = [&](uint32_t rule) {
        if (!empty[rule]) {
            empty[rule] = true;
            todo.push_back(rule);
        }
    };
    for (uint32_t rule = 0; rule < rules_.size(); ++rule) {
        for (uint32_t at : rules_[rule]) {
            const auto number = uint32_t(waits.size());
            uint32_t refs = 0;
            bool has_chars = false;
            for (; elements_[at].is != Is::end; ++at) {
                has_chars |= elements_[at].is == Is::chars;
                if (elements_[at].is == Is::rule) {
                    alternates_with[elements_[at].value].push_back(number);
                    ++refs;
                }
            }
            waits.push_back(has_chars ? UINT32_MAX : refs);
            owner.push_back(rule);
            if (!has_chars && refs == 0) {
                found_empty(rule);
            }
        }
    }
    while (!todo.empty()) {
        const uint32_t rule = todo.back();
        todo.pop_back();
        for (uint32_t number : alternates_with[rule]) {
            if (waits[number] != UINT32_MAX && --waits[number] == 0) {
                found_empty(owner[number]);
            }
        }
    }
    // What a rule may begin with. Behind the last element of an alternate nothing is stacked, so that x ::= "a"? x | is fine.
    struct First {
        uint32_t rule;
        bool     stacks;
    };
    std::vector<std::vector<First>> first(rules_.size());
    for (uint32_t rule = 0; rule < rules_.size(); ++rule) {
        for (uint32_t at : rules_[rule]) {
            for (bool more = true; more && elements_[at].is == Is::rule; ++at) {
                first[rule].push_back({elements_[at].value, elements_[at + 1].is != Is::end});
                more = empty[elements_[at].value];
            }
        }
    }
    // Strongly connected rules (Tarjan, 1972, without recursion); within them nothing may be stacked.
    constexpr uint32_t kFresh = UINT32_MAX;
    std::vector<uint32_t> index(rules_.size(), kFresh), lowest(rules_.size()), component(rules_.size(), kFresh), open;
    uint32_t count = 0;
    for (uint32_t start = 0; start < rules_.size(); ++start) {
        std::vector<std::pair<uint32_t, size_t>> path;  // rule, and which of its first ones comes next
        auto enter = [&](uint32_t rule) {
            index[rule] = lowest[rule] = count++;
            open.push_back(rule);
            path.emplace_back(rule, 0);
        };
        if (index[start] == kFresh) {
            enter(start);
        }
        while (!path.empty()) {
            const uint32_t rule = path.back().first;
            if (path.back().second < first[rule].size()) {
                const uint32_t into = first[rule][path.back().second++].rule;
                if (index[into] == kFresh) {
                    enter(into);
                } else if (component[into] == kFresh) {
                    lowest[rule] = std::min(lowest[rule], index[into]);
                }
                continue;
            }
            path.pop_back();
            if (!path.empty()) {
                lowest[path.back().first] = std::min(lowest[path.back().first], lowest[rule]);
            }
            if (lowest[rule] == index[rule]) {
                for (bool last = false; !last; open.pop_back()) {
                    component[open.back()] = rule;
                    last = open.back() == rule;
                }
            }
        }
    }
    for (uint32_t rule = 0; rule < rules_.size(); ++rule) {
        for (const First & f : first[rule]) {
            if (f.stacks && component[f.rule] == component[rule]) {
                throw bad("the rule '" + names[rule] + "' of the grammar begins with itself");
            }
        }
    }
}

// ---- matching

Vocabulary::Vocabulary(std::vector<std::string> pieces, std::vector<bool> ends)
    : pieces_(std::move(pieces)), ends_(std::move(ends)), order_(pieces_.size()) {
    std::iota(order_.begin(), order_.end(), 0);
    std::sort(order_.begin(), order_.end(), [&](int32_t a, int32_t b) { return pieces_[size_t(a)] < pieces_[size_t(b)]; });
}

Matcher::Matcher(std::shared_ptr<const Grammar> grammar, std::shared_ptr<const Vocabulary> vocabulary)
    : grammar_(std::move(grammar)), vocabulary_(std::move(vocabulary)) {
    left_ = kTokenWork;
    restart();
}

void Matcher::spend(uint64_t work) {
    if (work > left_) {
        left_ = 0;
        throw bad("the grammar is too ambiguous: it takes too much work");
    }
    left_ -= work;
}

int32_t Matcher::node(uint32_t at, int32_t below) {
    if (grammar_->elements_[at].is == Grammar::Is::end) {
        return below;
    }
    const auto [found, is_new] = node_of_.emplace(uint64_t(at) << 32 | uint32_t(below), int32_t(nodes_.size()));
    if (is_new) {
        nodes_.push_back({at, below});
        seen_.push_back(0);
    }
    return found->second;
}

// Adds the stacks that have characters, or nothing, on top where this one may have a rule.
void Matcher::expand(int32_t top, std::vector<int32_t> & into) {
    std::vector<int32_t> todo{top};
    while (!todo.empty()) {
        const int32_t id = todo.back();
        todo.pop_back();
        spend(16);
        if (id == kEmpty) {
            into.push_back(kEmpty);
            continue;
        }
        if (seen_[size_t(id)] == expansion_) {
            continue;
        }
        seen_[size_t(id)] = expansion_;
        const Node n = nodes_[size_t(id)];
        const Grammar::Element & element = grammar_->elements_[n.at];
        if (element.is == Grammar::Is::chars) {
            into.push_back(id);
            continue;
        }
        const int32_t below = node(n.at + 1, n.below);
        for (uint32_t begin : grammar_->rules_[element.value]) {
            todo.push_back(node(begin, below));
        }
    }
}

int32_t Matcher::state(State && s) {
    if (s.tops.empty()) {
        return kDead;
    }
    std::sort(s.tops.begin(), s.tops.end());
    s.tops.erase(std::unique(s.tops.begin(), s.tops.end()), s.tops.end());
    spend(16 + s.tops.size());
    const size_t tops = s.tops.size();
    const auto [found, is_new] = state_of_.emplace(std::move(s), int32_t(states_.size()));
    if (is_new) {
        states_.push_back(found);
        tops_ += tops;
    }
    return found->second;
}

void Matcher::restart() {
    broken_ = true;
    text_.clear();
    nodes_.clear(), node_of_.clear(), seen_.clear(), states_.clear(), state_of_.clear(), next_.clear();
    tops_ = 0;
    expansion_ = 1;
    State s;
    for (uint32_t begin : grammar_->rules_[grammar_->root_]) {
        expand(node(begin, kEmpty), s.tops);
    }
    now_ = state(std::move(s));
    if (now_ == kDead) {
        throw bad("no text follows the grammar");
    }
    broken_ = false;
}

// Forgets all but the state the text is in.
void Matcher::compact() {
    if (nodes_.size() + next_.size() + tops_ <= kMostCached) {
        return;
    }
    broken_ = true;
    const std::vector<Node> old = std::move(nodes_);
    State s = states_[size_t(now_)]->first;
    nodes_.clear(), node_of_.clear(), seen_.clear(), states_.clear(), state_of_.clear(), next_.clear();
    tops_ = 0;
    for (int32_t & top : s.tops) {
        std::vector<uint32_t> stack;
        for (int32_t id = top; id != kEmpty; id = old[size_t(id)].below) {
            stack.push_back(old[size_t(id)].at);
        }
        spend(1 + stack.size());
        top = kEmpty;
        for (auto at = stack.rbegin(); at != stack.rend(); ++at) {
            top = node(*at, top);
        }
    }
    now_ = state(std::move(s));
    broken_ = false;
}

int32_t Matcher::accept(const std::vector<int32_t> & tops, uint32_t character) {
    State s;
    ++expansion_;
    spend(tops.size());
    for (int32_t top : tops) {
        if (top == kEmpty) {
            continue;
        }
        const Node n = nodes_[size_t(top)];
        if (holds(grammar_->classes_[grammar_->elements_[n.at].value], character, character)) {
            expand(node(n.at + 1, n.below), s.tops);
        }
    }
    return state(std::move(s));
}

int32_t Matcher::step(const State & from, uint8_t byte) {
    if (from.lacks == 0 && byte < 0x80) {
        return accept(from.tops, byte);
    }
    State s;
    if (from.lacks == 0) {
        if (byte < 0xc2 || byte > 0xf4) {
            return kDead;
        }
        s.lacks = byte < 0xe0 ? 1 : byte < 0xf0 ? 2 : 3;
        s.value = byte & (0x3fu >> s.lacks);
        s.least = s.lacks == 1 ? 0x80 : s.lacks == 2 ? 0x800 : 0x10000;
    } else {
        if (byte >> 6 != 2) {
            return kDead;
        }
        s.lacks = uint8_t(from.lacks - 1);
        s.value = from.value << 6 | (byte & 0x3fu);
        s.least = from.least;
    }
    const uint32_t low  = std::max(s.value << 6 * s.lacks, s.least);
    const uint32_t high = std::min(((s.value + 1) << 6 * s.lacks) - 1, kLargest);
    if (low > high || (low >= 0xd800 && high <= 0xdfff)) {
        return kDead;
    }
    if (s.lacks == 0) {
        return accept(from.tops, low);
    }
    spend(from.tops.size());
    for (int32_t top : from.tops) {
        if (top != kEmpty && holds(grammar_->classes_[grammar_->elements_[nodes_[size_t(top)].at].value], low, high)) {
            s.tops.push_back(top);
        }
    }
    return state(std::move(s));
}

int32_t Matcher::after(int32_t from, uint8_t byte) {
    const uint64_t key = uint64_t(uint32_t(from)) << 8 | byte;
    if (const auto found = next_.find(key); found != next_.end()) {
        return found->second;
    }
    const int32_t to = step(states_[size_t(from)]->first, byte);
    next_.emplace(key, to);
    return to;
}

int32_t Matcher::through(int32_t from, std::string_view bytes) {
    for (size_t i = 0; i < bytes.size() && from != kDead; ++i) {
        from = after(from, uint8_t(bytes[i]));
    }
    return from;
}

bool Matcher::complete(int32_t s) const {
    const State & at = states_[size_t(s)]->first;
    return at.lacks == 0 && at.tops.front() == kEmpty;  // kEmpty sorts before every node
}

void Matcher::follow(std::span<const int32_t> text) {
    left_ = kTokenWork;
    if (broken_ || text.size() < text_.size() || !std::equal(text_.begin(), text_.end(), text.begin())) {
        restart();
    }
    left_ = kTokenWork * std::min(text.size() - text_.size() + 1, kMostFollowed);
    for (int32_t token : text.subspan(text_.size())) {
        if (token < 0 || size_t(token) >= vocabulary_->pieces_.size() || !allows(token) || vocabulary_->ends_[size_t(token)]) {
            throw bad("the text so far does not follow the grammar");
        }
        now_ = through(now_, vocabulary_->pieces_[size_t(token)]);
        text_.push_back(token);
        compact();
    }
    left_ = kTokenWork;
}

bool Matcher::allows(int32_t token) {
    const std::string & piece = vocabulary_->pieces_[size_t(token)];
    return vocabulary_->ends_[size_t(token)] ? complete(now_) : !piece.empty() && through(now_, piece) != kDead;
}

std::vector<bool> Matcher::allowed() {
    std::vector<bool> out(vocabulary_->pieces_.size());
    std::vector<int32_t> way{now_};  // states along the piece before, as far as it lived
    std::string_view before;
    for (int32_t token : vocabulary_->order_) {
        const std::string & piece = vocabulary_->pieces_[size_t(token)];
        if (vocabulary_->ends_[size_t(token)]) {
            out[size_t(token)] = complete(now_);
            continue;
        }
        const size_t common = size_t(std::mismatch(piece.begin(), piece.end(), before.begin(), before.end()).first - piece.begin());
        before = piece;
        if (common >= way.size()) {
            continue;  // it begins like one that died there
        }
        way.resize(common + 1);
        for (size_t i = common; i < piece.size(); ++i) {
            const int32_t to = after(way.back(), uint8_t(piece[i]));
            if (to == kDead) {
                break;
            }
            way.push_back(to);
        }
        out[size_t(token)] = !piece.empty() && way.size() == piece.size() + 1;
    }
    compact();
    return out;
}

}  // namespace meshnode

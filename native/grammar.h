// Text that has to follow a grammar (GBNF): which tokens may come next. Pure; its cost is bounded in counted work.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace meshnode {

constexpr size_t   kMaxGrammarBytes = 64 * 1024;
constexpr size_t   kMaxElements     = 64 * 1024;  // once repetitions are written out
constexpr uint32_t kMaxNesting      = 64;         // of parentheses: the parser recurses
constexpr uint64_t kTokenWork       = 1 << 20;    // some 30 ms; grammars in use need less than a twentieth of it
constexpr size_t   kMostFollowed    = 4;          // tokens' worth of work that following a history may take
constexpr size_t   kMostCached      = 1 << 14;    // nodes, tops of states and transitions that are kept from one token to the next

// A grammar as written, of rules over code points. Rule `root` is the whole text.
class Grammar {
  public:
    // Throws StageError bad_grammar: not GBNF, undefined or left-recursive rules, too large.
    explicit Grammar(std::string_view gbnf);

  private:
    friend class GrammarParser;
    friend class Matcher;

    using Ranges = std::vector<std::pair<uint32_t, uint32_t>>;  // of code points, inclusive, sorted, apart
    enum class Is : uint8_t { end, chars, rule };
    struct Element {
        Is       is    = Is::end;
        uint32_t value = 0;  // of classes_ or rules_
    };

    void refuse_left_recursion(const std::vector<std::string> & names) const;

    std::vector<Ranges>                classes_;
    std::vector<Element>               elements_;  // alternates one after the other, each with its end
    std::vector<std::vector<uint32_t>> rules_;     // where each of their alternates begins
    uint32_t                           root_ = 0;
};

// The bytes of every token, in an order in which those with a common beginning are neighbours.
class Vocabulary {
  public:
    // ends: the tokens that end a text. A token without bytes that does not is never part of a text.
    Vocabulary(std::vector<std::string> pieces, std::vector<bool> ends);

  private:
    friend class Matcher;

    std::vector<std::string> pieces_;
    std::vector<bool>        ends_;
    std::vector<int32_t>     order_;
};

// Where one text stands in its grammar: a set of stacks, and the bytes of a character that has begun.
class Matcher {
  public:
    // Throws StageError bad_grammar when even its beginning takes too much work.
    Matcher(std::shared_ptr<const Grammar> grammar, std::shared_ptr<const Vocabulary> vocabulary);

    // Goes to the end of a text: on from where it is when that is the text's beginning, else from the start. The three
    // below throw StageError bad_grammar when the text does not follow the grammar or that takes too much work.
    void follow(std::span<const int32_t> text);
    bool allows(int32_t token);
    std::vector<bool> allowed();  // by id

  private:
    static constexpr int32_t kEmpty = -1;  // the stack of a text that is complete
    static constexpr int32_t kDead  = -1;  // the state of a text that cannot be

    struct Node {
        uint32_t at;     // element to match next
        int32_t  below;  // node, or kEmpty
    };
    struct State {
        std::vector<int32_t> tops;  // sorted nodes, each at characters, or kEmpty
        uint32_t value = 0;         // of a character's bytes so far ...
        uint32_t least = 0;         // ... the least that is not overlong
        uint8_t  lacks = 0;         // ... and the bytes to come
        auto operator<=>(const State &) const = default;
    };

    void    restart();
    void    compact();
    void    spend(uint64_t work);
    int32_t node(uint32_t at, int32_t below);
    void    expand(int32_t top, std::vector<int32_t> & into);
    int32_t state(State && s);
    int32_t after(int32_t from, uint8_t byte);
    int32_t step(const State & from, uint8_t byte);
    int32_t accept(const std::vector<int32_t> & tops, uint32_t character);
    bool    complete(int32_t s) const;
    int32_t through(int32_t from, std::string_view bytes);

    std::shared_ptr<const Grammar>    grammar_;
    std::shared_ptr<const Vocabulary> vocabulary_;
    std::vector<int32_t> text_;  // followed so far
    int32_t  now_  = 0;
    uint64_t left_ = 0;  // work
    bool     broken_ = false;  // what is below was left half done by an exception

    std::vector<Node>                     nodes_;
    std::unordered_map<uint64_t, int32_t> node_of_;  // by at and below
    std::vector<uint32_t>                 seen_;     // by node: the expansion that came by last
    uint32_t                              expansion_ = 0;
    std::vector<std::map<State, int32_t>::iterator> states_;
    std::map<State, int32_t>                        state_of_;
    std::unordered_map<uint64_t, int32_t>           next_;  // by state and byte
    size_t                                          tops_ = 0;  // of all states
};

}  // namespace meshnode

// Grammars: what they take and refuse, against texts; and that no grammar holds the caller or ends the process.
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "grammar.h"
#include "sample.h"
#include "stage.h"
#include "test_check.h"

using namespace meshnode;

namespace {

constexpr int32_t kEnd = 256, kControl = 257;

// Every byte, an end, a control token, and some longer pieces, one of them half a character.
const std::vector<std::string> kLonger{"ab", "abc", "{\"", "\":", "true", "12", "\xc3", "\xa9x", "éa", "\xf0\x9f"};

std::shared_ptr<const Vocabulary> vocabulary() {
    std::vector<std::string> pieces;
    for (int byte = 0; byte < 256; ++byte) {
        pieces.emplace_back(1, char(byte));
    }
    pieces.insert(pieces.end(), {"</s>", ""});
    pieces.insert(pieces.end(), kLonger.begin(), kLonger.end());
    std::vector<bool> ends(pieces.size());
    ends[kEnd] = true;
    return std::make_shared<Vocabulary>(pieces, ends);
}

const auto kVocabulary = vocabulary();

Matcher matcher(const std::string & grammar) {
    return {std::make_shared<Grammar>(grammar), kVocabulary};
}

std::vector<int32_t> bytes(const std::string & text) {
    std::vector<int32_t> out;
    for (char c : text) {
        out.push_back(uint8_t(c));
    }
    return out;
}

// Whether the text is a whole one of the grammar; -1 when not even a beginning.
int fits(Matcher & m, const std::string & text) {
    try {
        m.follow(bytes(text));
    } catch (const StageError & e) {
        return -1;
    }
    return m.allows(kEnd);
}

void takes(const std::string & grammar, std::initializer_list<const char *> whole, std::initializer_list<const char *> beginnings,
           std::initializer_list<const char *> others) {
    Matcher m = matcher(grammar);
    for (const char * text : whole) {
        check(fits(m, text) == 1, grammar + " <- " + text, "is not whole");
    }
    for (const char * text : beginnings) {
        check(fits(m, text) == 0, grammar + " <- " + text, "is not a mere beginning");
    }
    for (const char * text : others) {
        check(fits(m, text) == -1, grammar + " <- " + text, "is taken");
    }
}

void refuses(const std::string & grammar, const std::string & says) {
    const auto begin = std::chrono::steady_clock::now();
    try {
        Matcher m = matcher(grammar);
        for (int i = 0; i < 40; ++i) {  // what is fine at first may be too much later
            m.follow(std::vector<int32_t>(size_t(i), 'a'));
            m.allowed();
        }
        check(false, grammar, "is taken");
    } catch (const StageError & e) {
        check(e.code == "bad_grammar", grammar, "has another code");
        check(std::string(e.what()).find(says) != std::string::npos, grammar, e.what());
    }
    check(std::chrono::steady_clock::now() - begin < std::chrono::seconds(10), grammar, "takes too long");
}

const char * const kJson = R"(
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? "}" ws
array  ::= "[" ws (value ("," ws value)*)? "]" ws
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws
ws     ::= | " " | "\n" [ \t]{0,20}
)";

}  // namespace

int main() {
    takes("root ::= \"a\" | \"bc\"", {"a", "bc"}, {"", "b"}, {"c", "ab", "bca"});
    takes("root ::= [a-c]{2,3} # twice or thrice\n", {"ab", "cba"}, {"a"}, {"abca", "d"});
    takes("root ::= \"ab\"{2}", {"abab"}, {"ab", "aba"}, {"ababa"});
    takes("root ::= \"a\"{2,} \"b\"?", {"aa", "aaaaa", "aab"}, {"a"}, {"ab", "aabb"});
    takes("root ::= \"a\"{0} \"b\"", {"b"}, {""}, {"a"});
    takes("root ::= (\n \"a\" |\n \"b\" )+ \"\\n\"\r\n", {"a\n", "bab\n"}, {"", "ab"}, {"\n"});
    takes("root ::= other-1*\nother-1 ::= \"(\" root \")\"", {"", "()", "(())()"}, {"(", "(()"}, {")", "())"});
    takes("root ::= [^a-y\\]]", {"z", "é", "[", "\n"}, {"", "\xc3", "\xf0\x9f\x8c"}, {"a", "]", "\x80", "\xc0\xaf", "\xed\xa0", "\xf4\x90"});
    takes("root ::= [\\u00e9-\\u00EA] \"\\U0001f30d\"", {"é\xf0\x9f\x8c\x8d", "ê\xf0\x9f\x8c\x8d"}, {"\xc3", "é\xf0\x9f"}, {"è", "\xc4", "é\xf1"});
    takes("root ::= . [-a] [b-]", {"x-b", "х--", "\xf0\x9f\x8c\x8d-b"}, {"x"}, {"xb"});
    takes("root ::= (\"a\"?)* (\"b\"*)+", {"", "aab", "bb"}, {}, {"ba"});
    takes("root ::= a\na ::= b\nb ::= a | \"x\"", {"x"}, {""}, {"y"});
    takes(kJson, {"{}", "{\"a\": [1, -2.5e3, {\"\\u00e9\": null}]}", "{\"é\":true} "}, {"", "{", "{\"a", "{\"a\":tr"},
          {"[", "{a", "{\"a\":01", "{\"a\":1,}", "{\"\n"});

    refuses("", "no rule 'root'");
    refuses("root", "::= is missing");
    refuses("root ::= x", "no rule 'x'");
    refuses("root ::= \"a", "ends within");
    refuses("root ::= [a", "ends within");
    refuses("root ::= [b-a]", "wrong way round");
    refuses("root ::= (\"a\"", "not closed");
    refuses("root ::= \"a\")", "cannot be read");
    refuses("a ::= \"a\"\n\nroot ::= \"\\q\"", "line 3");
    refuses("root ::= *", "nothing to repeat");
    refuses("root ::= \"a\"{3,2}", "wrong way round");
    refuses("root ::= \"a\"{x}", "needs a number");
    refuses("root ::= \"a\"{1", "not closed");
    refuses("root ::= \"\\U7fffffff\"", "beyond Unicode");
    refuses("root ::= <[3]>", "tokens cannot be named");
    refuses("root ::= \"a\"\nroot ::= \"b\"", "defined twice");
    refuses("root ::= root", "no text follows");
    refuses("root ::= root \"a\" | \"b\"", "begins with itself");
    refuses("root ::= e root \"a\" | \"b\"\ne ::= f f\nf ::= \"\"", "begins with itself");
    refuses("root ::= \"a\"{1000000}", "too large");
    refuses("root ::= \"a\"{0,99999999999999999999999}", "too large");
    refuses("root ::= ((((\"a\"{50}){50}){50}){50}){50} x", "no rule 'x'");
    refuses("root ::= \"abcdefgh\"{9999}", "too large");
    refuses(std::string("root ::= ") + std::string(30000, '('), "nested too deeply");
    refuses("root ::= \"" + std::string(1 << 16, 'a') + "\"", "longer than");

    // Ambiguity that doubles with every rule, every position or every character.
    std::string doubling = "root ::= r0\n", twice = "root ::= ";
    for (int i = 0; i < 60; ++i) {
        doubling += "r" + std::to_string(i) + " ::= r" + std::to_string(i + 1) + " \"a\" | r" + std::to_string(i + 1) + " \"b\"\n";
    }
    refuses(doubling + "r60 ::= \"a\"", "too much work");
    refuses("root ::= x*\nx ::= \"a\" x \"b\" | \"a\" x \"c\" | \"a\"", "too much work");
    std::string chain = "root ::= r0\n";  // searched once, not once for each way to come there
    for (int i = 0; i < 2000; ++i) {
        chain += "r" + std::to_string(i) + "::=r" + std::to_string(i + 1) + "|r" + std::to_string(i + 1) + "\n";
    }
    takes(chain + "r2000 ::= \"a\"", {"a"}, {""}, {"b"});
    std::string words = "root ::= \"w\"";
    for (int i = 0; i < 7000; ++i) {
        words += "|\"" + std::to_string(i * 7919 % 100003) + "\"";
    }
    takes(words, {"w", "7919"}, {"", "7"}, {"x"});

    // What may come next is just what could be pushed next; a text is followed from any point, and in any pieces.
    for (const char * grammar : {kJson, "root ::= [^\"]* \"é\"", "root ::= (\"ab\" \"c\"? [é-ê]?)+"}) {
        for (const char * text : {"", "{", "{\"a", "ab", "abc", "{\"a\":12"}) {
            Matcher m = matcher(grammar);
            if (fits(m, text) < 0) {
                continue;
            }
            const std::vector<bool> allowed = m.allowed();
            for (size_t id = 0; id < allowed.size(); ++id) {
                Matcher other = matcher(grammar);
                std::vector<int32_t> longer = bytes(text);
                other.follow(longer);
                check(other.allows(int32_t(id)) == allowed[id], grammar, "allows a token in one way and not in the other");
                longer.push_back(int32_t(id));
                bool followed = true;
                try {
                    other.follow(longer);
                } catch (const StageError &) {
                    followed = false;
                }
                check(followed == (allowed[id] && id != kEnd), grammar, "a token that is allowed cannot be followed");
            }
            check(!allowed[kControl], grammar, "a control token is allowed");
        }
    }

    // Sampling: greedy takes the best that may come next, and a drawn token is always one of them.
    std::vector<float> logits(258 + kLonger.size(), 0.0f);
    logits['b'] = 9, logits['q'] = 5, logits['a'] = 4, logits[kEnd] = 3;
    Matcher m = matcher("root ::= [a-q] \"b\"?");
    Sampling s;
    auto next = [&](std::vector<int32_t> history) {
        m.follow(history);
        return sample(logits, history, s, history.size(), &m);
    };
    check(next({}) == 'b' && next({'b'}) == 'b' && next({'b', 'b'}) == kEnd && next({'a'}) == 'b', "greedy", "is not the best allowed");
    logits['b'] = -9;
    check(next({}) == 'q' && next({'q'}) == kEnd, "greedy", "is not the best allowed");
    s.temperature = 100;
    for (s.seed = 0; s.seed < 200; ++s.seed) {
        const int32_t token = next({});
        check((token >= 'a' && token <= 'q') || token == kEnd + 2, "a drawn token", "does not follow the grammar");
    }
    Matcher none = {std::make_shared<Grammar>("root ::= \"a\" \"é\""), std::make_shared<Vocabulary>(std::vector<std::string>{"a", "b"}, std::vector<bool>(2))};
    none.follow(std::vector<int32_t>{0});
    try {
        sample(std::vector<float>{0, 0}, {}, s, 1, &none);
        check(false, "a dead end", "is sampled");
    } catch (const StageError & e) {
        check(e.code == "bad_grammar", "a dead end", "has another code");
    }

    // A long text stays cheap, also where every character is a state of its own.
    for (const char * grammar : {kJson, "root ::= \"{\" [a-z\"]{2000}"}) {
        Matcher longest = matcher(grammar);
        std::vector<int32_t> text = bytes("{\"");
        for (int i = 0; i < 1900; ++i) {
            text.push_back('a' + i % 26);
            longest.follow(text);
            check(longest.allows('z'), grammar, "a long text cannot go on");
        }
        Matcher again = matcher(grammar);
        again.follow(text);
        check(again.allowed() == longest.allowed(), grammar, "a long text is elsewhere when it is followed at once");
    }
    std::printf("grammar: %d failures\n", failures);
    return failures ? EXIT_FAILURE : EXIT_SUCCESS;
}

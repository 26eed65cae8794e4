// As much JSON as the tests' vectors need, so that no test needs more than a compiler.
#pragma once

#include <cctype>
#include <concepts>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace meshnode {

class Json {
  public:
    using Array  = std::vector<Json>;
    using Object = std::map<std::string, Json>;

    Json(std::nullptr_t = nullptr) {}
    Json(std::same_as<bool> auto flag) : value_(flag) {}
    Json(std::integral auto number)
        requires(!std::same_as<decltype(number), bool>)
        : value_(Number{std::to_string(number), double(number)}) {}
    Json(double number) : value_(Number{"", number}) {}
    Json(std::string text) : value_(std::move(text)) {}
    Json(const char * text) : value_(std::string(text)) {}
    template <class T> Json(const std::vector<T> & items) : value_(Array(items.begin(), items.end())) {}

    static Json array(std::initializer_list<Json> items = {}) { return Json(Array(items)); }
    static Json object(std::initializer_list<std::pair<const std::string, Json>> fields = {}) {
        Json json;
        json.value_ = Object(fields);
        return json;
    }
    static Json parse(const std::string & text) {
        size_t at = 0;
        return read(text, at);
    }

    bool operator==(const Json & other) const { return value_ == other.value_; }

    Json &       operator[](const char * key) { return std::get<Object>(value_)[key]; }
    const Json & operator[](const char * key) const { return std::get<Object>(value_).at(key); }
    const Array & items() const { return std::get<Array>(value_); }
    void push_back(Json item) { std::get<Array>(value_).push_back(std::move(item)); }

    const std::string & text() const { return std::get<std::string>(value_); }
    double   number() const { return std::get<Number>(value_).value; }
    uint64_t whole() const { return std::strtoull(std::get<Number>(value_).digits.c_str(), nullptr, 10); }
    template <class T> std::vector<T> numbers() const {
        std::vector<T> out;
        for (const Json & item : items()) {
            out.push_back(T(item.number()));
        }
        return out;
    }

  private:
    struct Number {
        std::string digits;  // as written, when it is a whole number: a double has too few of them
        double      value = 0;

        bool operator==(const Number & other) const {
            return digits.empty() || other.digits.empty() ? value == other.value : digits == other.digits;
        }
    };

    explicit Json(Array items) : value_(std::move(items)) {}

    static char next(const std::string & s, size_t & at) {
        while (at < s.size() && std::isspace(uint8_t(s[at]))) {
            ++at;
        }
        return s.at(at);
    }

    static Json read(const std::string & s, size_t & at) {
        switch (next(s, at)) {
            case '{': return read_object(s, at);
            case '[': return read_array(s, at);
            case '"': return read_text(s, at);
            case 't': at += 4; return true;
            case 'f': at += 5; return false;
            case 'n': at += 4; return nullptr;
        }
        const size_t begin = at;
        at = s.find_first_not_of("+-.0123456789eE", at);
        const std::string digits = s.substr(begin, at - begin);
        Json json(std::strtod(digits.c_str(), nullptr));
        if (digits.find_first_of(".eE") == std::string::npos) {
            std::get<Number>(json.value_).digits = digits;
        }
        return json;
    }

    static std::string read_text(const std::string & s, size_t & at) {
        std::string text;
        while (s.at(++at) != '"') {
            if (s[at] == '\\') {
                const char c = s.at(++at);
                if (c != '"' && c != '\\' && c != '/') {
                    throw std::runtime_error("an escape that these vectors have no use for");
                }
            }
            text += s[at];
        }
        ++at;
        return text;
    }

    static Json read_array(const std::string & s, size_t & at) {
        Array items;
        for (++at; next(s, at) != ']'; at += s[at] == ',') {
            items.push_back(read(s, at));
            next(s, at);
        }
        ++at;
        return Json(std::move(items));
    }

    static Json read_object(const std::string & s, size_t & at) {
        Json json = object();
        for (++at; next(s, at) != '}'; at += s[at] == ',') {
            const std::string key = read_text(s, at);
            next(s, at);
            json[key.c_str()] = read(s, ++at);
            next(s, at);
        }
        ++at;
        return json;
    }

    std::variant<std::nullptr_t, bool, Number, std::string, Array, Object> value_;
};

}  // namespace meshnode

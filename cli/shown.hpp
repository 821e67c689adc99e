// What a service says of itself, read by a vrdma that may be of another version: what is missing is null, and no reason to throw.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <type_traits>

#include "vrdma/printable.hpp"

namespace vrdma::cli {

// Of an answer that outlives it.
class Shown {
 public:
  Shown(const nlohmann::json& value) : value_(&value) {}
  Shown(nlohmann::json&&) = delete;
  const nlohmann::json& json() const { return *value_; }

  Shown at(const char* key) const {
    static const nlohmann::json none;
    if (!value_->is_object()) return none;
    const auto found = value_->find(key);
    return found == value_->end() ? none : *found;
  }
  bool has(const char* key) const { return value_->is_object() && value_->contains(key); }
  bool is_null() const { return value_->is_null(); }
  bool is_string() const { return value_->is_string(); }
  bool is_object() const { return value_->is_object(); }
  std::size_t size() const { return value_->size(); }
  // "-" for what is missing. For a terminal: texts of other hosts, machines and programs are among them.
  std::string text() const { return value_->is_string() ? without_controls(value_->get<std::string>()) : value_->is_null() ? "-" : value_->dump(); }
  std::uint64_t number() const { return value_->is_number() ? value_->get<std::uint64_t>() : 0; }
  bool is_true() const { return value_->is_boolean() && value_->get<bool>(); }
  bool is(const char* word) const { return value_->is_string() && value_->get_ref<const std::string&>() == word; }
  bool says_something() const { return value_->is_string() && !value_->get_ref<const std::string&>().empty(); }

  class Iterator {
   public:
    explicit Iterator(nlohmann::json::const_iterator at) : at_(at) {}
    Shown operator*() const { return *at_; }
    Iterator& operator++() { return ++at_, *this; }
    bool operator!=(const Iterator& other) const { return at_ != other.at_; }

   private:
    nlohmann::json::const_iterator at_;
  };
  Iterator begin() const { return Iterator(value_->cbegin()); }
  Iterator end() const { return Iterator(value_->cend()); }
  auto items() const { return value_->items(); }

 private:
  const nlohmann::json* value_;
};

}  // namespace vrdma::cli

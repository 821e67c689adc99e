#include "tests/conformance/coverage.hpp"

#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <vector>

#include "tests/conformance/run.hpp"

namespace vrdma::conformance {
namespace {

struct Item {
  std::string id;
  bool now;
  std::string claim;
  std::vector<const Test*> tests;
};

std::string escaped(const std::string& in) {
  std::string out;
  for (const char c : in) {
    if (c == '|') out += '\\';
    out += c;
  }
  return out;
}

}  // namespace

std::string check_coverage(const std::string& items_path, const std::string& markdown_path) {
  std::string complaints;
  std::ifstream in(items_path);
  if (!in) return text("cannot read the checklist ", items_path, "\n");
  std::vector<Item> items;
  std::map<std::string, std::size_t> by_id;
  std::string line;
  for (int number = 1; std::getline(in, line); ++number) {
    if (line.empty() || line[0] == '#') continue;
    const auto first = line.find('|');
    const auto second = first == std::string::npos ? first : line.find('|', first + 1);
    if (second == std::string::npos) {
      complaints += text(items_path, ":", number, ": not id|scope|claim\n");
      continue;
    }
    const std::string scope = line.substr(first + 1, second - first - 1);
    if (scope != "now" && scope != "later") complaints += text(items_path, ":", number, ": scope is now or later\n");
    Item item{line.substr(0, first), scope == "now", line.substr(second + 1), {}};
    if (!by_id.emplace(item.id, items.size()).second) complaints += text(items_path, ":", number, ": repeats ", item.id, "\n");
    items.push_back(std::move(item));
  }
  std::set<std::string> names;
  for (const Test& test : registry()) {
    if (!names.insert(test.name).second) complaints += text("two tests are named ", test.name, "\n");
    std::istringstream words(test.items);
    std::string id;
    bool any = false;
    while (words >> id) {
      any = true;
      const auto found = by_id.find(id);
      if (found == by_id.end()) {
        complaints += text(test.name, " names ", id, ", which is not in the checklist\n");
      } else {
        items[found->second].tests.push_back(&test);
      }
    }
    if (!any) complaints += text(test.name, " names no item\n");
  }
  std::size_t in_scope = 0;
  std::size_t covered = 0;
  std::ofstream out(markdown_path);
  out << "# Conformance: item → tests\n\n| item | scope | claim | tests |\n|---|---|---|---|\n";
  for (const Item& item : items) {
    out << "| " << item.id << " | " << (item.now ? "now" : "later") << " | " << escaped(item.claim) << " | ";
    for (std::size_t i = 0; i < item.tests.size(); ++i) out << (i ? ", " : "") << item.tests[i]->name;
    out << " |\n";
    if (!item.now) continue;
    ++in_scope;
    if (item.tests.empty()) {
      complaints += text("no test for ", item.id, ": ", item.claim, "\n");
    } else {
      ++covered;
    }
  }
  out << "\n" << covered << " of " << in_scope << " items in scope have a test; " << registry().size() << " tests.\n";
  out.flush();
  if (!out) complaints += text("cannot write ", markdown_path, "\n");
  return complaints;
}

}  // namespace vrdma::conformance

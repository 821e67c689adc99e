// Which item of the checklist is tested by what. Reads items.txt and the test registry, no device.
#pragma once

#include <string>

namespace vrdma::conformance {

// Writes the table to `markdown_path`. Answers the complaints, one a line: an item in scope without a test, a test that
// names an unknown item, a malformed or repeated line. Empty when all is well.
std::string check_coverage(const std::string& items_path, const std::string& markdown_path);

}  // namespace vrdma::conformance

// Texts of strangers, on their way to logs and terminals: escape sequences move the cursor, new lines make up lines of the log. Any thread.
#pragma once

#include <cstddef>
#include <string>

namespace vrdma {

// Where such a text comes in: printable ASCII, '?' for all else.
inline std::string printable(std::string text) {
  for (char& c : text)
    if (c < ' ' || c > '~') c = '?';
  return text;
}

// Where any text goes out, as the last wall: '?' for control characters, those that UTF-8 has from U+0080 on, too. The names of files stay what they are.
inline std::string without_controls(std::string text) {
  for (std::size_t at = 0; at < text.size(); ++at) {
    const auto byte = static_cast<unsigned char>(text[at]);
    if (byte < 0x20 || byte == 0x7f) text[at] = '?';
    if (byte == 0xc2 && at + 1 < text.size() && (static_cast<unsigned char>(text[at + 1]) & 0xe0) == 0x80) text[at] = text[at + 1] = '?', ++at;
  }
  return text;
}

}  // namespace vrdma

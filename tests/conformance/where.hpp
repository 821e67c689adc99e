// The caller's file and line as a default argument. std::source_location would do, but clang 14 cannot use libstdc++'s.
#pragma once

namespace vrdma::conformance {

class Where {
 public:
  static constexpr Where current(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
  constexpr const char* file_name() const { return file_; }
  constexpr int line() const { return line_; }

 private:
  constexpr Where(const char* file, int line) : file_(file), line_(line) {}
  const char* file_;
  int line_;
};

}  // namespace vrdma::conformance

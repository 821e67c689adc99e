// What reaches the log: lines of printable text, and no more of them than a disk can bear.
#include "vmkernel_svc/log/log.hpp"

#include <doctest/doctest.h>
#include <spdlog/sinks/ostream_sink.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <sstream>
#include <string>

namespace {

// The log while it lives.
class Captured {
 public:
  Captured() : before_(spdlog::default_logger()) {
    auto logger = std::make_shared<spdlog::logger>("test", std::make_shared<spdlog::sinks::ostream_sink_mt>(out_));
    logger->set_pattern("%l %v");
    spdlog::set_default_logger(std::move(logger));
  }
  ~Captured() { spdlog::set_default_logger(before_); }
  std::string text() const { return out_.str(); }

 private:
  std::ostringstream out_;
  std::shared_ptr<spdlog::logger> before_;
};

}  // namespace

using namespace vrdma;

TEST_CASE("ALineOfTheLogIsOneLineAndMovesNoCursor") {
  const Captured log;
  log::info("{} left", "\x1b[2J\r\n[info] root left\x7f \xc2\x9b""31m");
  CHECK(log.text() == "info ?[2J??[info] root left? ??31m left\n");
}

TEST_CASE("NamesOfFilesStayWhatTheyAreInTheLog") {
  const Captured log;
  log::warn("cannot read {}", "/home/zo\xc3\xab/\xe2\x82\xac");
  CHECK(log.text() == "warning cannot read /home/zo\xc3\xab/\xe2\x82\xac\n");
}

TEST_CASE("WhatStrangersSayIsPrintableAscii") {
  CHECK(printable("1.0 \xc3\xab\x1b\n~") == "1.0 ????~");
  CHECK(printable("") == "");
  CHECK(without_controls("\xc2") == "\xc2");  // cut in the middle
}

TEST_CASE("OfWhatAnybodyCanCauseAFewLinesInASecondAreLogged") {
  const Captured log;
  log::Sparing sparing(20);
  const auto second = [] { return std::chrono::duration_cast<std::chrono::seconds>(std::chrono::steady_clock::now().time_since_epoch()).count(); };
  const auto began = second();
  for (int i = 0; i < 20'000; ++i) sparing.info("guest-{} left", i);
  const auto lasted = second() - began + 1;
  const std::string text = log.text();
  CHECK(text.starts_with("info guest-0 left\ninfo guest-1 left\n"));
  CHECK(std::count(text.begin(), text.end(), '\n') <= lasted * (20 + 1));  // and one that says how many were left out
}

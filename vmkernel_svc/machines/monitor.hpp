// The monitor of a machine's QEMU (QEMU Machine Protocol), as far as the service listens to it: what it tells about the machine as a
// whole. A machine says nothing itself when it is reset, stands still or is saved. The server's thread.
//
// Nothing here decides: RunState knows what the news mean. Nobody is commanded, but to tell about migrations, too.
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "vmci_channel/given_descriptors.hpp"

namespace vrdma::svc {

struct MonitorNews {
  enum class Kind {
    reset,      // the machine begins anew, with the same memory
    stopped,    // its processors stand still
    resumed,    // they run, perhaps with another state than they had: one that was loaded
    suspended,  // by itself, to its RAM (ACPI's S3)
    woken,      // from that
    migration,  // `text`: its status
    run_state,  // the answer to a question at the beginning; `text`: QEMU's run state
    answer,     // to ask(); `text`: its number
  };
  Kind kind;
  std::string text;
  std::uint64_t at_us;  // since the epoch, by QEMU's clock, which is this host's; 0: an answer
};

class Monitor {
 public:
  using Handler = std::function<void(const MonitorNews&)>;
  // machine: its name, for the log.
  Monitor(boost::asio::io_context& io, std::string machine, Handler handler);
  ~Monitor();
  Monitor(const Monitor&) = delete;
  Monitor& operator=(const Monitor&) = delete;

  void talk_to(vmci::GivenFd qemu);   // in place of the one before
  int descriptor();                   // -1: there is none
  bool there() const { return socket_.is_open(); }
  void hang_up();
  void drain();                       // hands over what has been said by now
  // What comes before the answer was said before QEMU had heard the question, and nothing that comes after it.
  void ask(std::uint64_t number);
  // A line that QEMU has said. What concerns nobody is left out.
  static void understand(std::string_view line, const Handler& handler);

 private:
  void await();
  bool read();  // false: there is nothing more
  bool take(std::string_view text);  // false: it is no monitor
  void say(std::string_view command);
  void close();

  std::string machine_;
  Handler handler_;
  boost::asio::posix::stream_descriptor socket_;
  std::shared_ptr<vmci::Closer> closer_;  // of that
  std::string line_;  // its beginning
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  // handlers that outlive this look here first
};

}  // namespace vrdma::svc

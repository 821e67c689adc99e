// What a service says on standard error, where systemd's journal reads it: a line's priority is the number in front (sd-daemon(3)).
#pragma once

#include <string>

namespace vmci {

constexpr char journal_error = '3', journal_warning = '4', journal_info = '6', journal_debug = '7';

// By $JOURNAL_STREAM (systemd.exec(5)). That may be inherited from a service whose standard error went there, while ours does not.
bool journal_reads_stderr();
// "<3>", or nothing where it is not the journal that reads.
std::string journal_prefix(char priority);

}  // namespace vmci

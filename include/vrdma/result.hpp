// How the project's functions fail when the world (not the caller's bytes, not our bug) says no: an errno value.
// Status is a Result<void>. Nothing here throws unless value() is called on an error.
#pragma once

#include <boost/system/result.hpp>
#include <cerrno>
#include <cstdlib>

namespace vrdma {

enum class Errno : int {};  // Errno{EINVAL}
constexpr int value(Errno e) { return static_cast<int>(e); }

// boost::system::result calls this from value() on an error; reaching it is our bug.
[[noreturn]] inline void throw_exception_from_error(Errno const&, boost::source_location const&) { std::abort(); }

template <class T>
using Result = boost::system::result<T, Errno>;
using Status = Result<void>;

inline Errno last_error() { return Errno{errno}; }
inline Status ok() { return {}; }

}  // namespace vrdma

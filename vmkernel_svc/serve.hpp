// All of vrdmad behind one function: main.cpp, which has the headers of the command line, need not have those of the service.
#pragma once

namespace vrdma::svc {

struct Config;

// Until SIGTERM, SIGINT, SIGHUP, or idle for config.idle_exit_s. Throws std::runtime_error with a message for a person.
void serve(const Config& config);

// Whether the files that a good configuration names are there for this user, and good: the secret, or the certificates, of the hosts' subnet, those
// of an etcd; and whether anything but a socket stands where one is to be. Throws WrongConfiguration, but of a host's certificate, which
// may come, or become good, as serve() would.
void check_files(const Config& config);

}  // namespace vrdma::svc

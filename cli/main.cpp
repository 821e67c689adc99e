// vrdma: the command that a person types.
#include <CLI/CLI.hpp>
#include <cstdio>

#include "cli/run.hpp"

int main(int argc, char** argv) {
  using namespace vrdma::cli;
  CLI::App app{"vrdma: RDMA verbs for any process, with no HCA, no kernel module and no root.\n\n"
               "  vrdma run -- ib_send_lat          run a program over the virtual HCA vrdma0\n"
               "  vrdma run -- ib_send_lat localhost"};
  app.set_version_flag("--version", "vrdma " VRDMA_VERSION);
  app.require_subcommand(1);

  RunOptions run_options;
  CLI::App* const run_command = app.add_subcommand(
      "run", "Run a program with libvrdma in place of libibverbs. Starts a private vrdmad when no service is reachable;\n"
             "it is shared by your other `vrdma run`s and leaves by itself.");
  run_command->add_option("--link-layer", run_options.link_layer, "ib (default) or ethernet: what the port of vrdma0 says it is")
      ->check(CLI::IsMember({"ib", "ethernet"}));
  run_command->add_option("--name", run_options.name, "name of the guest: its GUID is derived from it and stays the same")
      ->check([](const std::string& name) { return name.size() < 32 ? "" : "a name has at most 31 characters"; });
  run_command->add_flag("--stats", run_options.stats, "print what the program did when it ends");
  run_command->add_option("command", run_options.command, "the program and its arguments, after --")->required();
  run_command->positionals_at_end();
  run_command->prefix_command(false);

  CLI11_PARSE(app, argc, argv);
  try {
    if (run_command->parsed()) return run(run_options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "vrdma: %s\n", error.what());
    return 125;
  }
  return 0;
}

#include "vmkernel_svc/hosts/subnet_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "vrdma/write_all.hpp"

namespace vrdma::hosts {

namespace {

using nlohmann::json;
constexpr int file_format = 1;

[[noreturn]] void refuse_file(const std::filesystem::path& file, const std::string& what) {
  throw std::runtime_error(fmt::format("{}: {}", file.string(), what));
}

// Which two hosts a state gives the same LIDs: for the message.
std::string clash_in(const Delta& delta) {
  for (std::size_t i = 0; i < delta.hosts.size(); ++i)
    for (std::size_t j = 0; j < i; ++j)
      if (overlap(delta.hosts[i].lids, delta.hosts[j].lids))
        return fmt::format("\"{}\" has LIDs {}-{} and \"{}\" {}-{}", delta.hosts[j].name, delta.hosts[j].lids.first, delta.hosts[j].lids.last,
                           delta.hosts[i].name, delta.hosts[i].lids.first, delta.hosts[i].lids.last);
  return "a name or a resting block is there twice";
}

}  // namespace

SubnetFile load_subnet(const std::filesystem::path& file) {
  SubnetFile content;
  if (!std::filesystem::exists(file)) return content;
  constexpr const char* remedy = "remove it: the others know what it held (where this host is the only manager of the subnet, restore it from a copy: else its partitions are lost)";
  std::string why;
  std::optional<Delta> delta;
  try {
    const json document = json::parse(read_file(file));
    if (document.at("format") != file_format)
      refuse_file(file, fmt::format("its format is {}, this vrdmad knows {}: run the version that wrote it", document.at("format").dump(), file_format));
    const json& lids = document.at("lids");
    content.memory.lids = {lids.at(0).get<std::uint16_t>(), lids.at(1).get<std::uint16_t>()};
    content.memory.serial = document.at("serial").get<std::string>();
    content.memory.consensus.term = document.at("term").get<std::uint64_t>();
    content.memory.consensus.voted_for = document.at("voted_for").get<std::string>();
    content.memory.consensus.origin = document.value("origin", std::uint64_t{0});  // older versions wrote none
    for (const json& one : document.at("managers"))
      content.managers.push_back({one.at("name").get<std::string>(), one.at("address").get<std::string>(), one.at("port").get<std::uint16_t>()});
    delta = decode_delta(document.at("state").dump(), why);
  } catch (const json::exception& error) {
    refuse_file(file, fmt::format("is damaged ({}): {}", error.what(), remedy));
  }
  const LidRange lids = content.memory.lids;
  if (lids != no_lids && (lids.first == 0 || lids.last < lids.first || lids.last > lid_max))
    refuse_file(file, fmt::format("is damaged (LIDs {}-{}): {}", lids.first, lids.last, remedy));
  if (!delta || delta->from != StateId{}) refuse_file(file, fmt::format("is damaged ({}): {}", delta ? "its state is a part" : why, remedy));
  if (!content.memory.consensus.state.apply(*delta)) refuse_file(file, fmt::format("two hold the same LIDs: {}: {}", clash_in(*delta), remedy));
  return content;
}

void save_subnet(const std::filesystem::path& file, const SubnetFile& content) {
  const auto& memory = content.memory;
  json document{{"format", file_format}, {"lids", json::array({memory.lids.first, memory.lids.last})}, {"serial", memory.serial}, {"term", memory.consensus.term},
                {"voted_for", memory.consensus.voted_for}, {"managers", json::array()}};
  if (memory.consensus.origin != 0) document["origin"] = memory.consensus.origin;
  for (const auto& one : content.managers) document["managers"].push_back({{"name", one.name}, {"address", one.address}, {"port", one.port}});
  std::string text = document.dump();
  text.back() = ',';
  text += "\"state\":" + encode(memory.consensus.state.since({})) + "}\n";
  const std::string beside = file.string() + ".new";
  const int fd = ::open(beside.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  const bool written = fd >= 0 && vrdma::write_all(fd, text) && ::fsync(fd) == 0;
  int why = errno;
  if (fd >= 0) ::close(fd);
  bool good = written && ::rename(beside.c_str(), file.c_str()) == 0;
  if (written && !good) why = errno;
  if (good) {
    const int folder = ::open(file.parent_path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    good = folder >= 0 && ::fsync(folder) == 0;
    why = errno;
    if (folder >= 0) ::close(folder);
  }
  if (!good) refuse_file(file, fmt::format("cannot be written ({})", std::strerror(why)));
}

}  // namespace vrdma::hosts

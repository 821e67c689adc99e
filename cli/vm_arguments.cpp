#include "cli/vm_arguments.hpp"

#include <fmt/format.h>

#include <string_view>

#include "vrdma/vm_link.hpp"

namespace vrdma::cli {

namespace {

// QEMU ends a value at a comma; a doubled one is meant itself.
std::string qemu_value(const std::string& value) {
  std::string out;
  for (const char c : value) out += c == ',' ? ",," : std::string(1, c);
  return out;
}

std::string xml(const std::string& text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '\'': out += "&apos;"; break;
      case '"': out += "&quot;"; break;
      default: out += c;
    }
  }
  return out;
}

// share=on: the service maps the same pages.
std::vector<std::string> ram_arguments(const Vm& vm) {
  if (vm.ram.empty()) return {};  // QEMU's own, as it is
  return {"-object", fmt::format("memory-backend-file,id=vrdma-ram,mem-path={},size={}M,share=on", qemu_value(vm.ram), vm.memory_bytes / mib),
          "-machine", "memory-backend=vrdma-ram"};
}

// QEMU tells the service when the machine is reset: until its new agent says so, the service would serve memory of the last boot.
std::vector<std::string> monitor_arguments(const Vm& vm) {
  const std::string path = vm.link.substr(0, vm.link.rfind('/') + 1) + "monitor.sock";
  return {"-chardev", "socket,id=vrdma-monitor,path=" + qemu_value(path), "-mon", "chardev=vrdma-monitor,mode=control"};
}

// Nobody tells the service of such a machine's reset: another kernel would boot in memory that the service still serves to peers.
bool ends_at_reset(const Vm& vm) { return vm.plain && !vm.ram.empty(); }

std::vector<std::string> plain_link_arguments(const Vm& vm) {
  return {"-object", fmt::format("memory-backend-file,id=vrdma,mem-path={},size={}M,share=on", qemu_value(vm.link), vm.bar_bytes / mib),
          "-device", "ivshmem-plain,memdev=vrdma"};
}

}  // namespace

std::vector<std::string> qemu_arguments(const Vm& vm) {
  std::vector<std::string> out;
  if (!vm.ram.empty()) out = {"-m", fmt::format("{}M", vm.memory_bytes / mib)};  // QEMU wants it to be that of the object
  for (auto& word : ram_arguments(vm)) out.push_back(std::move(word));
  if (vm.plain) {
    for (auto& word : plain_link_arguments(vm)) out.push_back(std::move(word));
    if (ends_at_reset(vm)) out.insert(out.end(), {"-action", "reboot=shutdown"});  // QEMU 6.0
    return out;
  }
  for (const auto& word : {std::string("-chardev"), "socket,id=vrdma,path=" + qemu_value(vm.link), std::string("-device"),
                           fmt::format("ivshmem-doorbell,chardev=vrdma,vectors={},master=on", vm.vectors)})
    out.push_back(word);
  for (auto& word : monitor_arguments(vm)) out.push_back(std::move(word));
  return out;
}

std::vector<std::string> qemu_interrupt_arguments() {
  return {"-machine", "q35,kernel-irqchip=split", "-device", "intel-iommu,intremap=on,caching-mode=on"};
}

std::string shell_quoted(const std::string& word) {
  constexpr std::string_view plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_=,./:@%+";
  if (!word.empty() && word.find_first_not_of(plain) == std::string::npos) return word;
  std::string out = "'";
  for (const char c : word) out += c == '\'' ? "'\\''" : std::string(1, c);
  return out + "'";
}

std::string libvirt_xml(const Vm& vm) {
  std::string out = "<domain type='kvm' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>\n";
  if (!vm.ram.empty())
    out += fmt::format(
        "  <memory unit='MiB'>{0}</memory>\n"
        "  <currentMemory unit='MiB'>{0}</currentMemory>\n",
        vm.memory_bytes / mib);
  if (ends_at_reset(vm)) out += "  <on_reboot>destroy</on_reboot>\n";
  if (!vm.plain)
    out += fmt::format(
        "  <!-- for interrupts: <features><ioapic driver='qemu'/></features> -->\n"
        "  <devices>\n"
        "    <!-- for interrupts: <iommu model='intel'><driver intremap='on' caching_mode='on'/></iommu> -->\n"
        "    <shmem name='vrdma' role='master'>\n"
        "      <model type='ivshmem-doorbell'/>\n"
        "      <server path='{}'/>\n"
        "      <msi vectors='{}'/>\n"
        "    </shmem>\n"
        "  </devices>\n",
        xml(vm.link), vm.vectors);
  // A plain link has a path of its own, and libvirt's <shmem> one that libvirt chooses. QEMU makes a device that libvirt does not know before
  // libvirt's own, so without a slot it would take one that libvirt has given to another.
  auto words = ram_arguments(vm);
  for (auto& word : vm.plain ? plain_link_arguments(vm) : monitor_arguments(vm)) words.push_back(std::move(word));
  if (vm.plain) words.back() += ",addr=0x18";
  // libvirt 9.0 has no use for the role of a device with a server, and QEMU saves no other than a master.
  else words.insert(words.end(), {"-global", "ivshmem-doorbell.master=on"});
  out += "  <qemu:commandline>\n";
  for (const auto& word : words) out += fmt::format("    <qemu:arg value='{}'/>\n", xml(word));
  return out + "  </qemu:commandline>\n</domain>\n";
}

}  // namespace vrdma::cli

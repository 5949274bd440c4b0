// What the installed Paddle says of its operators, as JSON: definitions of all that are registered, and where their kernels' code is.
#include <link.h>

#include <algorithm>
#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include "paddle/fluid/pir/dialect/operator/interface/op_yaml_info.h"
#include "paddle/phi/core/kernel_factory.h"
#include "paddle/pir/include/core/ir_context.h"

namespace {

std::string text;

template <typename List, typename Write>
std::string List_(const List &list, Write write) {
  std::ostringstream out;
  const char *comma = "";
  for (auto &each : list) {
    out << comma << write(each);
    comma = ",";
  }
  return "[" + out.str() + "]";
}

// A segment of a library in memory. (`dladdr` would look through all symbols for each kernel.)
struct Segment {
  const char *file;
  uintptr_t base, start, end;
};

std::vector<Segment> Segments() {
  std::vector<Segment> found;
  auto add = [](dl_phdr_info *info, size_t, void *found) {
    for (int k = 0; k < info->dlpi_phnum; ++k) {
      auto &header = info->dlpi_phdr[k];
      uintptr_t start = info->dlpi_addr + header.p_vaddr;
      if (header.p_type == PT_LOAD)
        static_cast<std::vector<Segment> *>(found)->push_back({info->dlpi_name, info->dlpi_addr, start, start + header.p_memsz});
    }
    return 0;
  };
  dl_iterate_phdr(add, &found);
  return found;
}

std::string Quoted(const std::string &name) { return "\"" + name + "\""; }

std::string Pair(const std::pair<std::string, std::string> &pair) {
  return "[" + Quoted(pair.first) + "," + Quoted(pair.second) + "]";
}

}  // namespace

extern "C" const char *interlace_definitions() {
  auto named = [](auto &each) { return Quoted(each.name); };
  auto typed = [](auto &each) { return Quoted(each.type_name); };
  text = List_(pir::IrContext::Instance()->registered_op_info_map(), [&](auto &entry) {
    std::string head = "{\"name\":" + Quoted(entry.first);
    auto *yaml = entry.second.template GetInterfaceImpl<paddle::dialect::OpYamlInfoInterface>();
    if (!yaml) return head + "}";
    auto [inputs, attributes, outputs, run_time, forward] = yaml->get_op_info_(entry.first);
    return head + ",\"operands\":" + List_(inputs, named) + ",\"attributes\":" + List_(attributes, named) + ",\"results\":" +
           List_(outputs, named) + ",\"kernel\":" + Quoted(run_time.kernel_func) + ",\"inplace\":" +
           List_(run_time.inplace, Pair) + ",\"views\":" + List_(run_time.view, Pair) + ",\"operand_types\":" +
           List_(inputs, typed) + ",\"attribute_types\":" + List_(attributes, typed) + ",\"optional\":" +
           List_(inputs, [](auto &each) { return std::string(each.optional ? "true" : "false"); }) + "}";
  });
  return text.c_str();
}

extern "C" const char *interlace_kernels() {
  std::ostringstream out;
  const char *comma = "";
  auto segments = Segments();
  for (auto &[name, kernels] : phi::KernelFactory::Instance().kernels()) {
    for (auto &[key, kernel] : kernels) {
      auto code = reinterpret_cast<uintptr_t>(kernel.GetVariadicKernelFn<void *>());
      auto holds = [&](auto &each) { return each.start <= code && code < each.end; };
      auto segment = std::find_if(segments.begin(), segments.end(), holds);
      if (segment == segments.end()) continue;
      out << comma << "[" << Quoted(name) << "," << Quoted(segment->file) << "," << code - segment->base << ","
          << (key.layout() == phi::DataLayout::STRIDED ? "true]" : "false]");
      comma = ",";
    }
  }
  text = "[" + out.str() + "]";
  return text.c_str();
}

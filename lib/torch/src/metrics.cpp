#include "metrics.h"

#include <c10/util/Exception.h>

#include <cstdlib>
#include <mutex>
#include <string>

#ifdef VPMM_TORCH_EXPORTER
#include <vpmm/exporter.h>
#endif

namespace vpmm_torch {

static const char* asked() {
  const char* text = std::getenv("VPMM_TORCH_METRICS");
  return text && *text ? text : nullptr;
}

#ifdef VPMM_TORCH_EXPORTER

static vpmm_exporter* exporter; // NULL: none; written once, by metrics_begin

struct Endpoint {
  std::string address;
  uint16_t port;
};

static Endpoint endpoint(const std::string& text) {
  Endpoint out{vpmm_exporter_config_default().address, 0};
  size_t colon = text.rfind(':');
  std::string digits = colon == std::string::npos ? text : text.substr(colon + 1);
  if (colon != std::string::npos)
    out.address = text.substr(0, colon);
  if (out.address.size() > 2 && out.address.front() == '[' && out.address.back() == ']')
    out.address = out.address.substr(1, out.address.size() - 2);
  char* end = nullptr;
  unsigned long port = std::strtoul(digits.c_str(), &end, 10);
  bool is_port = !digits.empty() && digits.find_first_not_of("0123456789") == std::string::npos && port <= UINT16_MAX;
  TORCH_CHECK(is_port, "VPMM_TORCH_METRICS is \"", text,
              "\": a port up to 65535, or an address and a port as in "
              "0.0.0.0:9435 and [::1]:9435");
  out.port = static_cast<uint16_t>(port);
  return out;
}

static void start(const char* text) {
  Endpoint where = endpoint(text);
  vpmm_exporter_config config = vpmm_exporter_config_default();
  config.address = where.address.c_str();
  config.port = where.port;
  if (vpmm_exporter_start(&config, &exporter) != VPMM_SUCCESS)
    TORCH_WARN("vpmm: no metrics are served, as VPMM_TORCH_METRICS=", text, " asks: ", vpmm_last_error());
}

void metrics_begin() {
  static std::once_flag once; // begun again by the next pool if it throws
  std::call_once(once, [] {
    if (const char* text = asked())
      start(text);
  });
}

void metrics_add(vpmm_pool* pool, MempoolId_t id) {
  std::string name = "pytorch";
  if (id != MempoolId_t{0, 0})
    name += " (" + std::to_string(id.first) + ", " + std::to_string(id.second) + ")";
  if (exporter)
    vpmm_exporter_add(exporter, pool, name.c_str()); // refused: there are too many, or this is the child of a fork
}

void metrics_remove(vpmm_pool* pool) {
  if (exporter)
    vpmm_exporter_remove(exporter, pool); // refused: it is not shown
}

#else

void metrics_begin() {
  if (asked()) { // the macro has an if of its own
    TORCH_WARN_ONCE(
        "vpmm: VPMM_TORCH_METRICS is set, and vpmm_torch was built without the exporter: install "
        "libmicrohttpd-dev, libgnutls28-dev, zlib1g-dev and libcrypt-dev, and build it again");
  }
}

void metrics_add(vpmm_pool*, MempoolId_t) {}

void metrics_remove(vpmm_pool*) {}

#endif

} // namespace vpmm_torch

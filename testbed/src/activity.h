// Times of device work from CUPTI, the driver's tracer, without events between kernels. Used if TESTBED_CUPTI is the library's path.
#pragma once
#include <vector>

namespace tb::activity {

struct Span {
  long piece;
  double begin_us, end_us;  // on the clock of now_us
};

// Starts tracing; the device must be idle. Returns false if CUPTI was not requested, or is missing, which is reported on stderr.
bool start();
// What this host thread launches until `end` belongs to the piece of work with this number.
void begin(long piece);
void end();
// Ends tracing; the device must be idle. Returns all pieces, each from the start of its first kernel or copy to the end of its last.
std::vector<Span> take();

}  // namespace tb::activity

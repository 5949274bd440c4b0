// Times of device work from CUPTI, the driver's tracer, without events between kernels. Used where TESTBED_CUPTI holds the library's path.
#pragma once
#include <vector>

namespace tb::activity {

struct Span {
  long piece;
  double begin_us, end_us;  // by now_us
};

// Begin to watch the device, which is idle; false where CUPTI was not asked for, or is not there, which is said.
bool start();
// What this host thread launches from here to `end` belongs to a piece of work, by its number.
void begin(long piece);
void end();
// All pieces since the start, each from the begin of its first kernel or copy to the end of its last; the device is idle. Watching ends.
std::vector<Span> take();

}  // namespace tb::activity

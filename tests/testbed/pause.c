/* The program of pods in tests: it waits until it is ended; as `pause N` it ends after N seconds. */
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

static void end(int number) { (void)number; _exit(0); }

int main(int count, char **arguments) {
  signal(SIGTERM, end);
  signal(SIGINT, end);
  if (count > 1) {
    sleep((unsigned)atoi(arguments[1]));
    return 0;
  }
  for (;;) pause();
}

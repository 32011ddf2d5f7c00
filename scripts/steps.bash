# For scripts of several steps, which source this: `run COMMAND` runs a step, and a signal to the script ends the step too.
set -m  # every step is a process group of its own
run() {
  "$@" & local pid=$! status=0
  wait $pid || status=$?
  while kill -0 $pid 2> /dev/null; do sleep 1; status=0; wait $pid || status=$?; done  # it was only suspended
  return $status
}
terminate() {
  local group
  for group in $(jobs -p); do kill -TERM -- -"$group" 2> /dev/null || true; done
}
end() {  # with a signal; the step saves what it has, and another signal ends it at once
  trap terminate HUP INT USR1 TERM
  terminate
  while [ -n "$(jobs -p)" ]; do wait || true; done
  exit $((128 + $1))
}
for name in HUP INT USR1 TERM; do trap "end $(kill -l $name)" $name; done  # their numbers differ between systems

# What both guests of test_softroce.py run: they move data, then the first takes every state a port can be found in.
set -e
coproc LOOK { python3 /job/look.py; }
look() {  # name, uid, memlock in KiB
  local code
  echo "$1 ${2:-0} ${3:--}" >&"${LOOK[1]}"
  read -r code <&"${LOOK[0]}"
  [ "$code" = 0 ]
}
bench() {  # name, uid, memlock in KiB, words
  local code
  echo "$1 $2 $3 bench --wait 300 --rdma ${*:4}" >&"${LOOK[1]}"
  read -r code <&"${LOOK[0]}"
  echo "$code" > "/out/$1.code"
}
wire() {  # slower than the emulated processors, so that other work of the machine does not show
  tc qdisc replace dev net1 root tbf rate "$1" burst 64kb limit 4mb
}

ip link set net1 mtu 9000
wire 12mbit
date +%s
if [ "$RANK" = 1 ]; then
  bench base 0 - "$MANAGEMENT_PEER" --save /out/base.result
  bench healthy 0 - "$MANAGEMENT_PEER" --baseline /out/base.result
  wire 4mbit
  bench shaped 0 - "$MANAGEMENT_PEER" --baseline /out/base.result
  bench memlock 1000 64 "$MANAGEMENT_PEER"
  look after || true
  exit
fi
for run in base healthy shaped memlock; do bench "$run" 0 - listen; done
look after || true
tc qdisc del dev net1 root
ip link set net1 mtu 1500

look up
ip link set net1 down; look down; ip link set net1 up
ip link set net1 mtu 9000; look jumbo; ip link set net1 mtu 1500
look user 1000 64
look root_bound 0 64
chmod 600 /dev/infiniband/uverbs0
look denied 1000 64
chmod 666 /dev/infiniband/uverbs0
ip link add mv0 link net1 type macvlan mode bridge
ip address add 192.168.77.9/24 dev mv0
ip link set mv0 up
modprobe bonding max_bonds=0
ip link add bond0 type bond
ip link add d0 type dummy
ip link set d0 master bond0
ip link set bond0 up
sleep 1
look tops
rdma link delete rxe0/1 2>/dev/null || rdma link delete rxe0
look none
date +%s

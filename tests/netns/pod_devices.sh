# What Multus and a macvlan attachment leave in a pod: eth0 is a veth whose other end is the host's, net1 a macvlan
# whose parent is not visible.
ip link add eth0 type veth peer name cali0
ip link set eth0 netns $POD
ip link set cali0 up
ip link add wire type veth peer name wireend
ip link set wire mtu 9000 up; ip link set wireend mtu 9000 up
ip link add net1 link wire type macvlan mode bridge
ip link set net1 netns $POD

# A wire to a card cannot be had without one: a veth pair stands in for it, which shows as "virtual".
ip link add wire type veth peer name wireend
ip address add 10.0.0.1/24 dev wire
ip link set wire mtu 9000 up; ip link set wireend mtu 9000 up
ip link add docker0 type bridge
ip address add 172.17.0.1/16 dev docker0
ip link add cni0 type bridge
ip address add 10.244.0.1/24 dev cni0
ip link add flannel.1 type vxlan id 1 dev wire local 10.0.0.1 dstport 8472
ip link add peer0 type veth peer name peer1
ip link set peer0 master docker0
for i in docker0 cni0 flannel.1 peer0 peer1; do ip link set $i up; done

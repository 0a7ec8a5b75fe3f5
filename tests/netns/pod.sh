ip address add 10.244.1.7/24 dev eth0
ip link set eth0 mtu 1450 up
ip route add default via 10.244.1.1
ip address add 192.168.77.1/24 dev net1
ip link set net1 up

"""Problems of a log: those that its messages name, and those that only all lines together show."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import replace

from collectives.nccl_log.codes import CODES, PROVIDERS, WORDS_OF, Meaning, find_case, list_codes, make_problem
from collectives.nccl_log.ledger import Ledger, Writer
from collectives.nccl_log.messages import Facts, gpus_are, gpus_before_ampere
from collectives.nccl_log.transport import ChannelCount, Evidence, LogProblem, ProofLine, by_severity, rank_words
from hardware.units import some

_FAILED = {"job_failed", "call_failed", "remote_failed", "python_traceback"}  # a process or its launcher said so
_BEFORE_2_19 = re.compile(r"2\.(1[0-8]|\d)\b")
_ANY_END = re.compile(r"Job step aborted|BAD TERMINATION|EXIT CODE: 15\b|KeyboardInterrupt")  # also after `scancel`
_KILLED = re.compile(r"died or was killed|(?<!killed by )SIGKILL|: -9\b")  # a timeout that follows is a consequence
# All but the first are also facts of facts.toml, or beginnings of such facts.
_RETRIED = ("retried", "a pod has a node", "a pod has its image", "a pod has its image, pulled now")
_NOTES = ("always", "one node", "another failure", "libfabric works", "finished", "port up", "earlier step", *_RETRIED)
_NO_CAUSE = ("time_limit_reached", "job_cancelled", "job_stopped", *list_codes("vague"), *list_codes("gdr"))
_DEFAULTS = {f"NCCL_{name}_DISABLE={value}" for name in ("P2P", "SHM", "IB") for value in ("0", "")}

# The most GPUs that one operating system was seen to have under NCCL (DGX-2, p2.16xlarge, HGX H20 of 16).
MAX_GPUS_OF_A_NODE = 16


def is_single_node(ledger: Ledger) -> bool | None:
    """Return whether all ranks are in one node; None if the log does not say."""
    facts = ledger.facts
    if facts.nodes:
        return facts.nodes == 1 and not facts.mnnvl
    listed = set(facts.test_ranks.values())
    elsewhere = bool(listed and ledger.hosts) and listed.isdisjoint(ledger.hosts)
    if ledger.host_count() > 1 or len(listed) > 1 or elsewhere:
        return False
    if facts.all_on_one_host():
        return True
    return False if _has_unseen_ranks(ledger) else None


def _has_unseen_ranks(ledger: Ledger) -> bool:
    """Return whether there are ranks without a device among those seen: a GPU has one rank of a communicator."""
    facts = ledger.facts
    pairs = facts.rank_devices()
    highest = max((rank for rank, _ in pairs), default=-1)
    if max(facts.ranks, highest + 1) > MAX_GPUS_OF_A_NODE:
        return True
    # Bus numbers have at least four digits; device numbers of NVML have one or two.
    devices = [int(device) for _, device in pairs if len(device) < 3 and device.isdigit()]
    return bool(devices) and len(devices) == len(pairs) and max(devices) < 8 <= max(highest, facts.ranks - 1)


def missing_ranks(ledger: Ledger) -> tuple[int, ...]:
    """Return the ranks of the job that no line shows; the log of one worker does not show what connects the nodes.

    Ranks are counted from 0, so the ranks below the lowest one that was seen are missing. Ranks above the highest one
    are missing only if a line states the number of ranks.
    """
    facts = ledger.facts
    present = {rank for rank, _ in facts.rank_devices()} | facts.largest_communicator.keys() | facts.test_ranks.keys()
    if not present or is_single_node(ledger) is not None:
        return ()
    end = min(facts.ranks, max(present) + 1 + MAX_GPUS_OF_A_NODE)
    return (*range(min(present)), *range(max(present) + 1, end))


def list_layers(ledger: Ledger) -> set[str]:
    """Return the link layers of the devices that carry channels; of all that NCCL lists if those are unknown."""
    layers = ledger.facts.layers
    used = {device for name, device in ledger.count_wires("network", "device") if name.startswith(("IB", "gIB"))}
    carrying = [(device, layer) for device, layer in layers if device in used]
    every_one_is_known = sorted(device for device, _ in carrying) == sorted(used)  # once each
    return {layer for _, layer in (carrying if used and every_one_is_known else layers)}


def is_one_direction(evidence: Evidence) -> bool:
    """Return whether GPUDirect RDMA was seen only on sends, or only on receives.

    The sender and the receiver each print a channel, so logs are missing if one half is missing. NCCL decides on
    GPUDirect RDMA for each direction separately (NCCL_NET_GDR_READ is for sends).
    """
    is_half = bool(evidence.send.total) != bool(evidence.receive.total) and not evidence.undirected.total
    return is_half and evidence.gdrdma == "on" and evidence.inter_node_transport is not None


def find(ledger: Ledger, evidence: Evidence) -> Evidence:
    """Add the problems, the notes (what was seen and is no problem here), and how the job ended."""
    findings = _Findings(ledger, evidence)
    for code in ledger.codes:
        findings.add_code(code)
    findings.explain_messages()
    findings.find_network()
    findings.find_gdrdma()
    findings.find_within_node()
    findings.find_ports()
    findings.find_environment()
    findings.find_missing_evidence()
    findings.find_setups()
    problems = findings.problems
    reasons = by_severity(problems[code] for code in list_codes("no_rdma") if code in problems)
    if reasons and "socket_fallback" in problems:
        action = f"The log names the reason ({reasons[0].code}). {reasons[0].action}"
        problems["socket_fallback"] = replace(problems["socket_fallback"], action=action)
    # The problem that names the reason comes before a CUDA error or a missing tag, then the watchdog that they set off,
    # and a slow path after any failure.
    slow = {code for code in list_codes("gdr") if code in problems and problems[code].severity == "fail"}
    ranked = by_severity(sorted(problems.values(), key=lambda each: CODES[each.code].symptom + 3 * (each.code in slow)))
    marks = [CODES[problem.code] for problem in (*ranked, *findings.consequences) if problem.severity == "fail"]
    outcome = "finished" if ledger.facts.finished else "unknown"
    outcome = "failed" if any(meaning.ends or meaning.breaks for meaning in marks) else outcome
    ranks = sorted(ledger.facts.largest_communicator.keys() | {rank for rank, _ in ledger.rank_hosts}) if ranked else []
    hosts = zip(ranks, ledger.hosts_of(Writer(rank=rank) for rank in ranks), strict=True)
    rank_hosts = {rank: host for rank, host in hosts if host}
    return replace(evidence, problems=ranked, notes=tuple(findings.notes), outcome=outcome, rank_hosts=rank_hosts)


class _Findings:
    """The problems of one run, by code, and its notes."""

    def __init__(self, ledger: Ledger, evidence: Evidence) -> None:
        self.ledger, self.evidence, self.facts = ledger, evidence, ledger.facts
        self.problems: dict[str, LogProblem] = {}
        self.notes: list[LogProblem] = []
        self.consequences: list[LogProblem] = []  # notes that say how the job ended, but less of why than a problem
        self.names = ledger.map_names()
        self.owners: dict[str, set[str]] = {}  # hosts of each address
        for address, host in self.facts.addresses:
            self.owners.setdefault(address, set()).add(self.names.get(host, host))
        self.names |= {address: min(hosts) for address, hosts in self.owners.items() if len(hosts) == 1}
        self.inter = evidence.inter_node_transport or ""

    def add(
        self, code: str, detail: str = "", lines: tuple[ProofLine, ...] = (), count: int = 0, severity: str = "",
        hosts: Collection[str] = (),
    ) -> None:  # fmt: skip
        """Add a problem once: of `hosts` and all their ranks, of its writers, or of the hosts that wrote its proof."""
        if code in self.problems:
            return
        meaning = CODES[code]
        proof = lines or tuple(self.ledger.code_lines.get(code, ()))
        proof = proof or (*self.prove_variables(*meaning.variables), *self.proof(*meaning.proof))
        writers = self.ledger.writers_of(code) if len(hosts) != 1 else ()  # both ends of a connection: who reports it
        ranks = self.ledger.ranks_of(writers) if writers else self.ledger.ranks_on(hosts)
        hosts = set(hosts or self._named(self.ledger.hosts_of(writers)) or self._named(row.host for row in proof))
        self.problems[code] = make_problem(
            code, detail, lines=self._select_lines(proof, hosts), count=count or self.ledger.codes[code] or 1,
            hosts=tuple(sorted(hosts)), ranks=ranks, severity=severity or meaning.severity,
            **self._words(meaning, proof),
        )  # fmt: skip

    def _words(self, meaning: Meaning, proof: tuple[ProofLine, ...]) -> dict[str, str]:
        """Return the action, and the message if the case has one, for what the log shows (lines, ports, versions)."""
        facts = self.facts
        rows = [row.text for row in proof] + [f"{port}/{layer}" for (_, port), layer in facts.ports.items()]
        named = {"NCCL": facts.versions, "provider": facts.providers, "GPUDirect RDMA": (w for _, w in facts.gdr_words)}
        text = "\n".join((*rows, *facts.counts, *(f"{kind} {name}" for kind, names in named.items() for name in names)))
        return {"action": meaning.action} | find_case(meaning, text)

    def add_code(self, code: str) -> None:
        """Add a code of messages, in the words of the provider that libfabric chose."""
        provider = self.facts.provider or "efa"
        other = CODES[code].other_provider
        if provider.startswith("efa") or not other:
            hosts = self._find_ends(code) if CODES[code].either_end else ()
            self.add(code, "this host is one end of each failed connection" * (len(hosts) == 1), hosts=hosts)
            return
        if other == "libfabric_request_failed" and provider == "cxi":
            other = "slingshot_request_failed"
        lines, count = tuple(self.ledger.code_lines.get(code, ())), self.ledger.codes[code]
        self.add(other, f"provider {provider}", lines, count)

    def demote(self, code: str) -> None:
        """Make a problem a note."""
        self.notes.append(self.problems.pop(code))

    def has_failure(self, *without: str) -> bool:
        """Return whether a problem other than these is a failure."""
        return any(problem.severity == "fail" for code, problem in self.problems.items() if code not in without)

    def has_reason(self, code: str) -> bool:
        """Return whether another problem can be the reason of this one. No call fails for lack of GPUDirect RDMA."""
        return self.has_failure(code, *list_codes("gdr"))

    # --- lines and hosts

    def _named(self, hosts: Iterable[str]) -> tuple[str, ...]:
        """Return the hosts by their whole names, each once; the name with its domain where both are in the log."""
        names = dict.fromkeys(self.names.get(host, host) for host in hosts if host)
        short = {name[:end] for name in names for end, letter in enumerate(name) if letter == "."}
        return tuple(name for name in names if name not in short)

    def _find_ends(self, code: str) -> Collection[str]:
        """Return the host, or the address, that is an end of all connections that failed, if no other can be at fault.

        Of a single connection, return both ends.
        Two other hosts have such a connection by its own lines, or by theirs. In a chain of three the first may have
        ended, and the second because of it. A host that closed connections is the peer of all.
        """
        ends: list[tuple[str, str]] = []
        for _, host, address in (row for row in self.ledger.code_peers if row[0] == code):
            owners = self._named(self.owners.get(address, ()))
            if len(owners) > 1 or address.startswith("127."):  # of a bridge or a loopback: each host has its own
                return ()
            ends.append((self.names.get(host, host), owners[0] if owners else address))
        hosts = set(self._named(host for _, host in self.facts.addresses))
        for one in {end for pair in ends for end in pair if end}.intersection(*ends):
            writers = {host for host, peer in ends if host and peer == one} - {one}
            peers = {peer for host, peer in ends if host == one} & hosts - {one}
            if len(writers) > 1 or (len(peers) > 1 and code != "connection_closed_by_peer"):
                return {one}
        return set(ends[0]) if len(set(ends)) == 1 and all(ends[0]) else ()

    def _select_lines(self, rows: tuple[ProofLine, ...], hosts: set[str]) -> tuple[ProofLine, ...]:
        """Return a line of each of the first four of these hosts or devices, or two of one; any if none is theirs."""
        selected = tuple(row for row in rows if hosts.intersection(self._named([row.host]))) or rows
        firsts: dict[tuple[str, str], ProofLine] = {}
        for row in selected:
            firsts.setdefault(row.origin, row)
        return tuple(firsts.values())[:4] if len(firsts) > 1 else selected[:2]

    def proof(self, *starts: str) -> tuple[ProofLine, ...]:
        """Return the lines that prove facts with these beginnings."""
        rows = [row for fact, rows in self.ledger.proof.items() if fact.startswith(starts) for row in rows]
        return tuple(sorted(rows, key=lambda row: row.line))

    def _channel_proof(self) -> tuple[ProofLine, ...]:
        """Return the lines of channels without GPUDirect RDMA, those of different kinds first."""
        proof = [rows for fact, rows in self.ledger.proof.items() if fact.endswith("without GDRDMA")]
        lines = (*(rows[0] for rows in proof), *(row for rows in proof for row in rows[1:]))
        return lines or self.proof("GPUDirect RDMA refused")

    def prove_variables(self, *variables: str) -> tuple[ProofLine, ...]:
        """Return a line of each host with these environment variables, "NAME" or "NAME=VALUE", and no default value."""
        lines = [row for row in self.ledger.variable_lines.items() if row[0][0] not in _DEFAULTS]
        return tuple(row for name in variables for (setting, _), row in lines if name in (setting, row.proves))

    def _list_hosts_off(self) -> tuple[str, ...]:
        """Return the hosts with channels over RDMA of which none has GPUDirect RDMA."""
        wires = self.ledger.count_wires("host", "network")
        have = {host for (host, _), count in wires.items() if count.gdrdma}
        return tuple(dict.fromkeys(host for host, net in wires if host and net != "Socket" and host not in have))

    def _hosts_over(self, network: str) -> tuple[str, ...]:
        """Return the hosts with channels over this network; without such channels, those that chose it."""
        over = tuple(host for host, name in self.ledger.count_wires("host", "network") if host and name == network)
        return over or self._named(row.host for row in self.proof(f"network {network} "))

    # --- messages

    def explain_messages(self) -> None:
        """Make consequences and noise notes if the log has the first cause."""
        refused = {writer.host for writer in self.ledger.writers_of("ibv_open_device_failed")}
        others_work = self.inter.startswith("IB") and len(refused) >= self.ledger.host_count()
        fails = [code for code, row in self.problems.items() if row.severity == "fail" and self.ledger.attempts]
        mild = {code: self.ledger.outlived(code, before_nccl=True) for code in fails}  # of an attempt before the last
        is_unsure = self.inter.startswith("NVLink") or bool(self.inter and self._note_several()[1])
        mild |= {"libibverbs_missing": is_unsure, "ibv_open_device_failed": others_work}
        for code in [code for code, holds in mild.items() if holds and code in self.problems]:
            self.problems[code] = replace(self.problems[code], severity="warn")
        for code in [code for kind in _NOTES for code in self.problems if CODES[code].note == kind]:
            if self._meets(CODES[code].note, code):
                self.demote(code)
        if not self.has_reason("remote_failed") and not self.facts.finished:
            for code in self.problems.keys() & list_codes("alone"):
                texts = self._words(replace(CODES[code], action=CODES[code].alone), self.problems[code].lines)
                self.problems[code] = replace(self.problems[code], severity="fail", action=texts["action"])
        for code in ("job_cancelled", "job_stopped"):  # what a launcher does after the first process that failed
            if code in self.problems and self._follows_a_failure(code):
                self.demote(code)
        lines = self.ledger.code_lines
        late = {row.file: row.line for row in reversed(lines.get("watchdog_timeout", ()))}
        for code in sorted(list_codes("vague"), key=lambda code: -CODES[code].vague):
            early = any(row.line < late.get(row.file, 0) and _KILLED.search(row.text) for row in lines.get(code, ()))
            if code in self.problems and self.has_failure(code, *list_codes("gdr"), *["watchdog_timeout"] * early):
                self.consequences.append(self.problems[code])
                self.demote(code)
        hung, waited = (self.problems.get(code) for code in ("watchdog_hung", "watchdog_timeout"))
        if hung and waited and hung.ranks and {*hung.ranks} <= {*waited.ranks}:  # it hung as it aborted what timed out
            self.demote("watchdog_hung")
        full = any("No space" in row.text for row in lines.get("shm_too_small", ()))
        if "shm_not_registered" in self.problems:  # one of the two explains the other
            self.problems.pop("shm_not_registered" if full else "shm_too_small", None)
        if "gid_index_invalid" in self.problems and list_layers(self.ledger) == {"IB"}:
            self.demote("gid_index_invalid")

    def _follows_a_failure(self, code: str) -> bool:
        """Return whether in each file a failure precedes the code, and training did not continue after it."""
        lines, steps = self.ledger.code_lines, self.ledger.steps
        failed = [row for each in self.problems.keys() & _FAILED for row in lines[each]
                  if row.line >= steps.get(row.file, (0,))[0] and not _ANY_END.search(row.text)]  # fmt: skip
        return all(any(row.file == other.file and row.line > other.line for other in failed) for row in lines[code])

    def _meets(self, condition: str, code: str) -> bool:
        """Return whether a condition of codes.toml (`note`) holds."""
        if condition in ("finished", "port up", "earlier step"):
            is_up = self.facts.counts["an RDMA port came up again"] > 0 or condition != "port up"
            return is_up and self.ledger.outlived(code, before_nccl=condition == "earlier step")
        if condition == "libfabric works":  # one protocol of the plugin failed, and another was chosen
            return "Libfabric" in self.inter and bool(self.evidence.transports or self.facts.provider)
        if condition == "another failure":
            return self.has_reason("remote_failed")
        if condition in _RETRIED:  # what failed was tried again, with success
            began = {row.file: row.line for row in reversed(self.proof(condition))}
            began |= self.ledger.began if self.inter else {}
            rows = [(file, row) for (other, file), row in self.ledger.last_lines.items() if other == code]
            return bool(began) and all(row < began.get(file, 0) for file, row in rows)
        return condition == "always" or self.evidence.inter_node_transport is None

    # --- the network

    def find_network(self) -> None:
        """Find problems of the network that was chosen. NCCL's own transport (IB) and its plugin (IBext) do not mix."""
        facts, over_sockets = self.facts, self._hosts_over("Socket")
        if self.inter == "Socket":
            unsure, severity = self._note_several()
            self.add("socket_fallback", unsure, severity=severity, hosts=over_sockets)
        one_node = facts.nodes == 1 or facts.all_on_one_host() or (not self.inter and facts.ranks > 0)
        if facts.counts["no RDMA device"] and not one_node and self.inter in ("", "Socket", "unknown"):
            self.add("no_ib_device", count=facts.counts["no RDMA device"])
        networks = facts.networks.keys() | self.ledger.networks().keys()
        own = {*self._hosts_over("IB")} if "IB" in facts.networks else set()
        apart = own and any(own.isdisjoint(self._hosts_over(name)) for name in facts.networks if name[:5] == "IBext")
        if not one_node and (("Socket" in networks and len(networks) > 1) or apart):
            on = {name: sorted(self._hosts_over(name)) for name in sorted(networks)[:16]}
            detail = "; ".join(f"{name} on {', '.join(hosts[:4])}" if hosts else name for name, hosts in on.items())
            others = {host for name, hosts in on.items() if name != "Socket" for host in hosts}.difference(over_sockets)
            twice = {*self.ledger.ranks_on(over_sockets)} & {*self.ledger.ranks_on(others)}  # not in one communicator
            detail += ". Both have the same rank numbers, so they are of several jobs or groups of ranks" * bool(twice)
            self.add("socket_fallback" if twice else "mixed_networks", detail, hosts=over_sockets)
        if self.inter and len(list_layers(self.ledger)) > 1:
            self.add("mixed_link_layers", ", ".join(self.evidence.hcas))
        self._find_interface()

    def _find_interface(self) -> None:
        """Find an interface that does not lead to other nodes; within a node the loopback interface does.

        The bootstrap uses the first interface. Channels over sockets are spread over all that are listed.
        """
        sockets = list(self.facts.sockets)
        used = [*list(self.facts.bootstrap)[:1], *(sockets if self.inter == "Socket" else sockets[:1])]
        apart = (self.facts.nodes or self.ledger.host_count()) > 1 or self.inter != "unknown"
        suspects = dict.fromkeys(one for one in used if one.startswith(WORDS_OF["bridges"]) or (apart and one == "lo"))
        if self.inter and suspects:
            others = [name for name in sockets if name not in suspects]
            suffix = f" (other interfaces: {', '.join(others[:4])})" if others else ""
            local = not self.facts.finished and any(name.startswith(WORDS_OF["local"]) for name in suspects)
            has_begun = self.evidence.transports or self.facts.counts["completed set-ups"]
            stuck = (not has_begun or (others and self.inter == "Socket")) and not self._note_several()[1]
            stops = local and (stuck or "socket_connect_failed" in self.problems)
            self.add("docker_interface_used", some(list(suspects), limit=3) + suffix, severity="fail" if stops else "")
            self.problems = {"docker_interface_used": self.problems.pop("docker_interface_used"), **self.problems}

    def _note_several(self) -> tuple[str, str]:
        """Return a reservation and a severity if no channel used the sockets, and nothing shows a second node."""
        evidence = self.evidence
        carried = evidence.torn_lines or any(name.startswith("NET/") for name in evidence.transports)
        if is_single_node(self.ledger) is False or carried:
            return "", ""
        return "if the job has several: the log shows one host and no channel", "warn"

    def find_ports(self) -> None:
        """Find ports that are down on some hosts: NCCL lists only active ports, and they are compared between hosts."""
        listed = {host: {port for other, port in self.facts.ports if other == host} for host in self.facts.whole_lists}
        fullest = max(listed, key=lambda host: len(listed[host]), default="")
        missing = [
            f"{host}: {port} (which {fullest} lists)"
            for host, row in listed.items() if row < listed[fullest] for port in sorted(listed[fullest] - row)
        ]  # fmt: skip
        if missing:
            hosts = dict.fromkeys(each.partition(": ")[0] for each in missing)
            self.add("dead_port", some(missing, limit=16), count=len(missing), hosts=tuple(hosts))

    # --- GPUDirect RDMA

    def find_gdrdma(self) -> None:
        """Find channels without GPUDirect RDMA, and the reason."""
        evidence, state = self.evidence, self.evidence.gdrdma
        carried = list(self.ledger.networks()) or [evidence.network or ""]
        # Channels of one host over the network are another problem.
        within = not self.inter and evidence.send.total + evidence.receive.total > 0
        lacks = state in ("off", "partial") and not within
        if lacks and gpus_are("without GPUDirect RDMA", evidence.gpus):
            lines = self.proof("GPU ") + self._channel_proof()
            self.add("gdr_not_supported_by_gpu", ", ".join(evidence.gpus), lines)
            return
        if lacks and "Socket" not in carried and self.prove_variables(*CODES["gdr_disabled_by_env"].variables):
            self.add("gdr_disabled_by_env")
        if state == "partial":
            self._find_partial()
        if is_one_direction(evidence):
            self.add("one_direction_seen", _describe_part(evidence, []))
        if state == "off" and lacks and "Socket" not in carried:
            self._find_off(carried)
        refused = {enabled for name, enabled in self.facts.gdr_hca if "Libfabric" in name}
        if refused == {False} and evidence.gdrdma_fraction is None:
            self.add("gdr_refused_by_plugin")
        if state in ("off", "none") and "Socket" not in carried:
            self._find_distance()
        if evidence.torn_lines and state == "none":
            self.add("torn_channel_lines", f"{evidence.torn_lines} lines", count=evidence.torn_lines)

    def _find_partial(self) -> None:
        evidence = self.evidence
        sockets = self.ledger.networks().get("Socket", ChannelCount()).total
        seen = evidence.send + evidence.receive + evidence.undirected
        if sockets and seen.total - seen.gdrdma <= sockets:  # sockets cannot have it: mixed_networks names their ranks
            return
        code = "gdr_partial" if sockets else _choose_partial_code(evidence, self.facts)
        partial = code == "gdr_partial"
        hosts = self._list_hosts_off() if partial else ()
        lacking = [name for name, n in evidence.devices.items() if n.gdrdma < n.total and name.split()[0] not in hosts]
        detail = _describe_part(evidence, lacking)
        far = [path for path in evidence.gdr_paths if path.startswith("disabled")]
        if far and partial:
            detail += f"; {'; '.join(far[:3])}"
        severity = ""
        if code == "gdr_read_disabled_pre_ampere" and not evidence.gpus:
            detail += "; the log names no GPU, so this rests on the direction alone, and no line contradicts it"
            severity = "warn"  # not proven: the name of the GPU decides
        elif code == "gdr_read_disabled_pre_ampere" and not gpus_before_ampere(evidence.gpus):
            detail += "; before 2.19 NCCL did so for every GPU without NVLink"
        if hosts:
            detail = f"none on {', '.join(hosts[:4])}{' and others' if len(hosts) > 4 else ''}; in total {detail}"
        lines = self._channel_proof() + self.proof("GPUDirect RDMA too far")
        self.add(code, detail, lines, severity=severity, hosts=hosts)
        states = self.facts.gdr_words.keys()
        refused = [host for host in hosts if (host, "refused") in states and (host, "usable") not in states]
        if refused:
            self.add("peermem_missing", hosts=refused)

    def _find_off(self, carried: list[str]) -> None:
        is_ib = any(name.startswith(("IB", "gIB")) for name in carried) or self.inter.startswith("IB")
        if self.evidence.gdrdma_fraction is not None:  # without a channel, what refused it is reported below
            provider = self.facts.provider if any("Libfabric" in name for name in (self.inter, *carried)) else None
            codes = (code for start, code in PROVIDERS if provider is not None and provider.startswith(start))
            code = "socket_fallback" if "FastSocket" in carried else next(codes, "net_without_gdrdma")
            code = "ib_without_gdrdma" if is_ib else code
            self.add(code, _describe_part(self.evidence, []), self._channel_proof(), hosts=self._list_hosts_off())
            self.problems.pop("gdr_refused_by_plugin", None)
        refused = {enabled for name, enabled in self.facts.gdr_hca if name != "Socket"} == {False}
        if is_ib and refused and "gdr_disabled_by_env" not in self.problems:
            self.add("peermem_missing")

    def _find_distance(self) -> None:
        """Find that all GPUs and NICs are too far apart. NCCL says so while it plans, before there are channels."""
        paths = self.facts.gdr_paths
        explained = self.problems.keys() & {"gdr_disabled_by_env", "peermem_missing"}
        if self.inter and paths and not any(enabled for enabled, _, _ in paths) and not explained:
            severity = "fail" if self.evidence.gdrdma == "off" else ""  # no channel has it, and this is the reason
            self.add("gdr_distance_too_far", "; ".join(self.evidence.gdr_paths[:3]), severity=severity)

    # --- within a node, and the environment

    def find_within_node(self) -> None:
        """Find channels within a node that avoid direct access between GPUs."""
        env, transports = self.evidence.environment, self.evidence.transports
        shm = transports.get("SHM", 0)
        peer = sum(n for key, n in transports.items() if key.startswith("P2P/"))
        if shm and self.prove_variables("NCCL_P2P_DISABLE=1"):
            self.add("p2p_disabled_by_env")
        elif shm and "NCCL_P2P_LEVEL" in env:
            self.add("p2p_level_limited_by_env", env["NCCL_P2P_LEVEL"])
        elif shm and peer:
            self.add("shm_across_pairs", f"{shm} of {shm + peer} channels")
        if not self.inter and any(key.startswith("NET/") for key in transports):
            names = CODES["net_within_node"].variables
            causes = [f"{name}={env[name]}" for name in names if env.get(name, "0") not in ("0", "")]
            only = causes and not shm and not peer
            self.add("net_only_within_node" if only else "net_within_node", ", ".join(causes))

    def find_environment(self) -> None:
        """Find variables that cause or hide a problem."""
        env = self.evidence.environment
        if "Socket" in self.inter.split():  # or mixed with another network
            for code in ("ib_disabled_by_env", "socket_forced_by_env"):
                if self.prove_variables(*CODES[code].variables):
                    self.add(code, severity=self._note_several()[1])
        set_by_plugin = WORDS_OF["set_by_ofi"] if "Libfabric" in self.inter else ()
        names = (name for name in env if name in WORDS_OF["tuning"] and name not in set_by_plugin)
        tuned = [name for name in names if self.prove_variables(name)]
        if tuned:
            detail = ", ".join(f"{name}={env[name]}" for name in tuned[:12])
            self.add("hand_tuned_env", detail, self.prove_variables(*tuned), len(tuned))
            # If the transport is proven, tuning is a matter of advice and no fault of the run.
            if self.evidence.transports or self.evidence.gdrdma != "none" or self.has_failure():
                self.demote("hand_tuned_env")

    def find_missing_evidence(self) -> None:
        """Say what the log lacks for a verdict."""
        evidence, facts = self.evidence, self.facts
        # One rank has no channel.
        is_silent = not evidence.transports and evidence.gdrdma == "none" and facts.ranks != 1
        unclear = ("call_failed", "remote_failed")
        if not self.has_failure(*unclear) and (is_silent or self.problems.keys() & unclear):
            for unknown in [note for note in self.notes if note.code in ("other_warnings", "sharp_init_failed")]:
                self.notes.remove(unknown)
                self.problems[unknown.code] = replace(unknown, severity="warn")
        if self.has_failure() or evidence.torn_lines:
            return
        missing = missing_ranks(self.ledger) if evidence.gdrdma == "none" and evidence.transports else ()
        unread = facts.unread_ranks()
        if evidence.gdrdma == "on" and not self.problems and not facts.largest_communicator.keys() <= {0}:
            # As many as a host has: the line of one rank may be torn. Most frameworks write the log of rank 0 only.
            missing = unread if len(unread) * self.ledger.host_count() >= len(facts.largest_communicator) else ()
        if missing:
            missing = unread or missing
            self.add("ranks_missing", f"{rank_words(missing)} {'is' if len(missing) == 1 else 'are'} missing")
        elif is_silent:
            self.add("no_transport_evidence")
        elif evidence.transports and evidence.gdrdma == "none" and self.inter not in ("", "NVLink (MNNVL)"):
            self.add("no_inter_node_evidence")

    def find_setups(self) -> None:
        """Find ranks that began a communicator and did not complete it. Others did, or the log has no channel."""
        facts, rows, code = self.facts, self.facts.setups, "setup_not_completed"
        waiting = [member for member, state in rows if state == "START" and (member, "COMPLETE") not in rows]
        begun, completed = facts.counts["set-ups"], facts.counts["completed set-ups"]  # torn lines may lack the rank
        goes_on = facts.finished or self.ledger.steps or facts.counts["lines left out by Ray"]
        expired = "time_limit_reached" in self.problems  # so the log was not cut
        is_shown = waiting and begun > completed and (completed or expired or not self.evidence.transports)
        if is_shown and not goes_on and not self.has_failure(code, *_NO_CAUSE):
            self.add(code, hosts=self._named(member.host for member in waiting), severity="fail" if expired else "")
            ranks = tuple(sorted({member.rank for member in waiting}))
            self.problems = {code: replace(self.problems.pop(code), ranks=ranks), **self.problems}


def _describe_part(evidence: Evidence, lacking: list[str]) -> str:
    """Return how many channels have GPUDirect RDMA, in words, and the devices of those without it."""
    send, receive = evidence.send, evidence.receive
    noun = "channel" if max(send.total, receive.total) == 1 else "channels"
    counts = [f"{word} {n.gdrdma} of {n.total}" for word, n in (("send", send), ("receive", receive)) if n.total]
    return f"{', '.join(counts)} {noun}" + (f"; without it: channels of {', '.join(lacking[:16])}" if lacking else "")


def _choose_partial_code(evidence: Evidence, facts: Facts) -> str:
    """Return why a part of the channels has no GPUDirect RDMA: NCCL's rule for sends, or no reason that excuses it.

    The rule (ncclTopoCheckGdr): below compute capability 8.0 and without NVLink the NIC does not read GPU memory,
    unless the GPU is the only one of its node. Before 2.19 the rule applied to every compute capability. Any fact of
    the log that contradicts such a GPU removes the excuse.
    """
    send, receive = evidence.send, evidence.receive
    one_way = receive.total > 0 and receive.gdrdma == receive.total and send.total > 0 and send.gdrdma == 0
    if not one_way or evidence.library != "nccl":  # AMD has no such rule
        return "gdr_partial"
    if evidence.environment.get("NCCL_NET_GDR_READ") == "0":
        return "gdr_read_disabled_by_env"
    against = (
        (gpus_before_ampere(evidence.gpus) is False
         and not (_BEFORE_2_19.match(evidence.nccl_version or "") and gpus_are("card", evidence.gpus)))
        or facts.local_ranks == 1  # the rule does not apply to a GPU that is alone on its node in every communicator
        or evidence.nvls_use in ("available", "used")  # Hopper and later
        or facts.mnnvl or facts.mnnvl_fabric
        or facts.gdr_read_allowed  # "Enabled ... (distance 4 <= 4), read 1"
        or any(not enabled for enabled, _, _ in facts.gdr_paths)  # too far, which is another reason
        or any(name.endswith("/read") for name in evidence.transports)  # printed with NVLink on 8.0 only
        or facts.nvlink
    )  # fmt: skip
    return "gdr_partial" if against else "gdr_read_disabled_pre_ampere"

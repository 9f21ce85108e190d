"""For each law a line whose breaking must turn it red. `make mutants` breaks each, in a copy, and demands it.

A law that stays green over its broken line guards nothing. To add one: a `Mutant` below, with the test's node id, the
file, the line as it stands (without its indentation) and the broken line. `python -m tests.laws.mutants WORD` runs
those whose file, test or line contains WORD.
"""

import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("configs", "envs", "launch", "models", "rl", "tests", "pyproject.toml", "setup.py", "README.md", "Makefile")
TIMEOUT_S = 300


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One broken line: `test` must fail when `line` of `file` reads `broken`."""

    test: str
    file: str
    line: str
    broken: str


MUTANTS: tuple[Mutant, ...] = (
    # -- giving episodes up: a failure, audited by address, left out without a trace, never while evaluating
    Mutant(
        "tests/laws/test_abandon.py::test_what_was_given_up_is_a_failure_whatever_the_world_said",
        "rl/rollout/worker.py",
        "if status not in (Status.DONE, Status.GAVE_UP):",
        "if status not in (Status.DONE, Status.GAVE_UP, Status.ABANDONED):",
    ),
    Mutant(
        "tests/laws/test_abandon.py::test_audited_an_episode_is_what_it_would_have_been",
        "rl/rollout/abandon.py",
        "return not audited",
        "return True",
    ),
    Mutant(
        "tests/laws/test_abandon.py::test_audited_an_episode_is_what_it_would_have_been",
        "rl/rollout/abandon.py",
        'found |= {"s": spent_s - found["s"], "tokens": tokens - found["tokens"]}',
        'found |= {"s": spent_s, "tokens": tokens - found["tokens"]}',
    ),
    Mutant(
        "tests/laws/test_abandon.py::test_the_decision_knows_texts_and_the_address_alone",
        "rl/rollout/abandon.py",
        "audited = self._audited()",
        "audited = self._audited() or spent_s > 1e5",
    ),
    Mutant(
        "tests/laws/test_abandon.py::test_the_audit_is_a_share_of_the_members_addressed_by_seed_ticket_and_member",
        "rl/rollout/abandon.py",
        "return lambda ticket, member: int(fold_in(request_key(seed, ticket, member), _AUDIT)[0]) < share * 2**32",
        "return lambda ticket, member: int(fold_in(request_key(seed, ticket, 0), _AUDIT)[0]) < share * 2**32",
    ),
    Mutant(
        "tests/laws/test_abandon.py::test_who_is_left_out_changes_nothing_for_the_others",
        "rl/rewards/compose.py",
        "compared = [i for i, t in enumerate(group) if t.status.scored and t.status not in excluded]",
        "compared = [i for i, t in enumerate(group) if t.status.scored]",
    ),
    Mutant(
        "tests/laws/test_abandon.py::test_who_is_left_out_changes_nothing_for_the_others",
        "rl/loop.py",
        "compared = [t for t in members if t.status not in excluded]",
        "compared = list(members)",
    ),
    Mutant(
        "tests/laws/test_abandon.py::test_a_group_is_compared_by_two_or_dropped",
        "rl/loop.py",
        "group.dropped or sum(bool(np.isfinite(reward(t))) for t in compared) < min(MIN_SCORED, len(members))",
        "group.dropped",
    ),
    Mutant(
        "tests/laws/test_abandon.py::test_the_state_that_a_critic_judges_is_what_the_next_turn_goes_on_from",
        "rl/rollout/values.py",
        'return value(params["value_head"], hidden, segment)[jnp.arange(len(length)), length]',
        'return value(params["value_head"], hidden, segment)[jnp.arange(len(length)), length - 1]',
    ),
    Mutant(
        "tests/laws/test_abandon.py::test_the_state_that_a_critic_judges_is_what_the_next_turn_goes_on_from",
        "rl/rollout/worker.py",
        "return [*(() if breaks else record.tokens), *new_ids]",
        "return [*(() if breaks else record.tokens)]",
    ),
    Mutant(
        "tests/laws/test_resume.py::test_with_all_that_would_be_given_up_audited_it_is_the_run_without",
        "launch/build.py",
        "contextlib.closing(build_pool(plan, engine, place, codec, abandonment=abandonment)) as pool,",
        "contextlib.closing(build_pool(plan, engine, place, codec)) as pool,",
    ),
    Mutant(
        "tests/laws/test_abandon.py::test_evaluation_gives_nothing_up",
        "launch/build.py",
        "if not (plan.eval.constrain_tools or plan.rollout.abandon.is_on):",
        "if not plan.eval.constrain_tools:",
    ),
    # -- fleets: where a world is changes nothing, what it breaks is its own, and no process is left behind
    Mutant(
        "tests/laws/test_fleet.py::test_episodes_through_processes_are_those_of_threads",
        "envs/fleet/host.py",
        "inbox = self._inboxes.pop(instance, None) if verb == CLOSE else self._inboxes.get(instance)",
        "inbox = self._inboxes.pop(instance, None) if verb == CLOSE else self._inboxes.get(max(self._inboxes))",
    ),
    Mutant(
        "tests/laws/test_fleet.py::test_an_episode_whose_world_always_dies_says_how",
        "envs/fleet/process.py",
        "self.ended = how + self._killed",
        'self.ended = "ended"',
    ),
    Mutant(
        "tests/laws/test_fleet.py::test_a_crash_changes_no_result",
        "envs/fleet/fleet.py",
        "return self.member.ready and self.member.ended is None and self.hung < MOST_HUNG",
        "return self.member.ready and self.hung < MOST_HUNG",
    ),
    Mutant(
        "tests/envs/test_fleet.py::test_a_process_that_dies_says_how_and_its_place_is_filled",
        "envs/fleet/fleet.py",
        "while not self._fleet._begins(self._running, self._instance):",
        "while False:",
    ),
    Mutant(
        "tests/envs/test_fleet.py::test_a_failure_is_of_the_same_kind_on_both_sides",
        "envs/fleet/host.py",
        "raise (EnvLost if kind == INFRASTRUCTURE else EnvError)(text)",
        "raise EnvError(text)",
    ),
    Mutant(
        "tests/envs/test_fleet.py::test_an_instance_that_cannot_be_made_leaves_nothing_behind",
        "envs/fleet/fleet.py",
        "running.member.tell(instance, CLOSE)  # what it began there",
        "pass",
    ),
    Mutant(
        "tests/envs/test_fleet.py::test_a_process_that_does_not_answer_is_killed",
        "envs/fleet/fleet.py",
        "elif member.ready and member.silent_s() > self._silence_s:",
        "elif False:",
    ),
    Mutant(
        "tests/rl/test_concurrency.py::test_never_more_calls_at_once_than_the_world_bears",
        "rl/rollout/concurrency.py",
        "while self._line and len(self._holders) < self._most:",
        "while self._line:",
    ),
    Mutant(
        "tests/rl/test_concurrency.py::test_the_pool_begins_no_episode_over_the_limit",
        "rl/rollout/pool.py",
        "return bool(self._table.jobs) and not in_pause and self._in_flight < self._most_in_flight",
        "return bool(self._table.jobs) and not in_pause",
    ),
    Mutant(
        "tests/rl/test_concurrency.py::test_who_waits_for_a_turn_when_the_pool_closes_is_cancelled",
        "rl/rollout/table.py",
        "if self.closing and trajectory.status is Status.ENV_ERROR:",
        "if False:",
    ),
    Mutant(
        "tests/rl/test_concurrency.py::test_calls_of_very_different_length_are_no_crowd",
        "rl/rollout/concurrency.py",
        "call_s = calls_s / calls if calls >= FEWEST_CALLS else None",
        "call_s = calls_s / calls if calls >= 8 else None",
    ),
    Mutant(
        "tests/rl/test_feeder.py::test_a_ticket_that_passed_is_settled_only_while_its_task_is_passed",
        "rl/rollout/feeder.py",
        "for t in trajectories) and (trajectories or passes(task)):",
        "for t in trajectories):",
    ),
    Mutant(
        "tests/rl/test_concurrency.py::test_a_controller_that_fails_holds_nothing_back_and_is_heard_of",
        "rl/rollout/concurrency.py",
        "raise failure[0]",
        "pass",
    ),
    Mutant(
        "tests/rl/test_loop.py::test_without_a_quarantine_no_task_is_held",
        "rl/loop.py",
        "share = groups_per_batch // hosts.count",
        "share, quarantine = groups_per_batch // hosts.count, quarantine or Quarantine()",
    ),
    Mutant(
        "tests/rl/test_concurrency.py::test_it_never_exceeds_what_it_may",
        "rl/rollout/concurrency.py",
        "return InFlight(min(max(1, most), cap), shortest_s, quiet_s, calls, calls_s)",
        "return InFlight(max(1, most), shortest_s, quiet_s, calls, calls_s)",
    ),
    Mutant(
        "tests/laws/test_fleet.py::test_a_member_that_is_made_again_costs_no_more_than_its_episodes",
        "rl/rollout/concurrency.py",
        "while begins and not self._ready(0.0):  # others may call meanwhile",
        "while False:",
    ),
    Mutant(
        "tests/laws/test_fleet.py::test_a_call_that_hangs_there_costs_no_thread_here",
        "launch/worlds.py",
        "return call_deadline_s - min(1.0, 0.1 * call_deadline_s)",
        "return call_deadline_s + 1.0",
    ),
    Mutant(
        "tests/envs/test_fleet.py::test_a_member_that_cannot_be_started_again_is_tried_again",
        "envs/fleet/fleet.py",
        "if not self._began:",
        "if True:",
    ),
    Mutant(
        "tests/envs/test_fleet.py::test_a_call_that_ends_late_hangs_no_more",
        "envs/fleet/fleet.py",
        "if any(has_ended() for has_ended in running.late):",
        "if False:",
    ),
    Mutant(
        "tests/envs/test_fleet.py::test_what_ray_loses_is_the_infrastructures",
        "envs/fleet/ray_actor.py",
        "except self._ray.exceptions.RayError as error:  # the actor has ended, or",
        "except self._ray.exceptions.RayActorError as error:  # the actor has ended, or",
    ),
    Mutant(
        "tests/envs/test_fleet.py::test_a_retired_member_waits_for_no_episode_that_was_left",
        "envs/fleet/fleet.py",
        "if not running.playing or rests or running.member.silent_s() > self._silence_s:",
        "if not running.playing or running.member.silent_s() > self._silence_s:",
    ),
    Mutant(
        "tests/chaos/test_programs.py::test_a_run_whose_worlds_end_their_processes_ends_and_leaves_none",
        "envs/chaos.py",
        "os._exit(EXIT_CODE)",
        "return call()",
    ),
    Mutant(
        "tests/chaos/test_programs.py::test_faults_that_count_in_a_folder_go_on_where_another_process_ended",
        "envs/chaos.py",
        "return os.lseek(fd, 0, os.SEEK_CUR)",
        "return 1",
    ),
    Mutant(
        "tests/laws/test_fleet.py::test_no_process_outlives_its_parent",
        "envs/fleet/host.py",
        "ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)",
        "pass",
    ),
    Mutant(
        "tests/laws/test_fleet.py::test_no_process_outlives_its_fleet",
        "envs/fleet/fleet.py",
        "member.join(until_s)",
        "pass",
    ),
    # -- the code world: a reward comes from the released tests over the sources alone; the sandbox holds
    Mutant(
        "tests/laws/test_code_grading.py::test_a_missing_test_is_a_failure",
        "envs/code/grade.py",
        'return sum(outcomes.get(test) == "passed" for test in wanted) / len(wanted) if wanted else 1.0',
        'return sum(outcomes.get(test, "passed") == "passed" for test in wanted) / len(wanted) if wanted else 1.0',
    ),
    Mutant(
        "tests/laws/test_code_grading.py::test_a_weakened_test_does_not_count_and_the_fix_survives",
        "envs/code/grade.py",
        "sources = taken_over(package, changed)",
        "sources = dict(changed)",
    ),
    Mutant(
        "tests/laws/test_code_grading.py::test_a_report_in_which_everything_passes_is_not_believed",
        "envs/code/grade.py",
        "if not true:",
        "if False:",
    ),
    Mutant(
        "tests/laws/test_code_grading.py::test_hidden_calls_must_be_right",
        "envs/code/grade.py",
        "success = report.ended and true and readable and f2p == p2p == variants == 1.0 and not exploits",
        "success = report.ended and true and readable and f2p == p2p == 1.0 and not exploits",
    ),
    Mutant(
        "tests/laws/test_code_grading.py::test_a_report_without_the_nonce_is_none",
        "envs/code/suite.py",
        'return value if isinstance(value, dict) and secrets.compare_digest(str(value.get("nonce")), nonce) else None',
        "return value if isinstance(value, dict) else None",
    ),
    Mutant(
        "tests/laws/test_code_grading.py::test_configuration_is_never_taken_over_even_with_a_fix",
        "envs/code/episode.py",
        "if protected(self._repository.package, path) and not own:  # a new test module anybody may write",
        "if False:",
    ),
    Mutant(
        "tests/envs/test_code_tasks.py::test_a_flaky_bug_is_no_task",
        "envs/code/tasks.py",
        'if not again.ended or set(failing) & _having(again, "passed"):',
        "if False:",
    ),
    Mutant(
        "tests/envs/test_code_tools.py::test_similarity",
        "envs/code/similarity.py",
        "paths = predicted.keys() | gold.keys()",
        "paths = gold.keys()",
    ),
    Mutant(
        "tests/envs/test_sandbox.py::test_no_attack_succeeds",
        "envs/sandbox_server.py",
        'for hidden in ("/scratch", settings["base"]):',
        'for hidden in ("/scratch",):',
    ),
    Mutant(
        "tests/envs/test_sandbox.py::test_no_attack_succeeds",
        "envs/sandbox_server.py",
        "code += [(give, 0, 0, eperm), (give, 0, 0, allow)]",
        "code = [(give, 0, 0, allow)]",
    ),
    Mutant(
        "tests/laws/test_code_grading.py::test_what_a_run_shows_is_seen_without_the_screen",
        "envs/code/inside.py",
        "broken = seal() + foreign",
        "broken = seal()",
    ),
    Mutant(
        "tests/laws/test_code_grading.py::test_the_screen",
        "envs/code/grade.py",
        "return _read(syntax.parse(text.encode()))  # bytes: a coding line decides what they are, here as there",
        "return _read(syntax.parse(text))",
    ),
    Mutant(
        "tests/laws/test_code_grading.py::test_what_cannot_be_read_is_no_success",
        "envs/code/grade.py",
        "success = report.ended and true and readable and f2p == p2p == variants == 1.0 and not exploits",
        "success = report.ended and true and f2p == p2p == variants == 1.0 and not exploits",
    ),
    Mutant(
        "tests/laws/test_code_grading.py::test_the_answer_is_not_there_in_compiled_form",
        "envs/sandbox_server.py",
        '_forget_compiled(folder, message["files"])',
        "pass",
    ),
    Mutant(
        "tests/laws/test_code_grading.py::test_an_incomplete_repair_is_no_success_and_no_exploit",
        "envs/code/grade.py",
        "special = bool(broken) and all(got[i] == before[i] for i in broken)",
        "special = bool(broken) and any(got[i] == before[i] for i in broken)",
    ),
    Mutant(
        "tests/laws/test_code_grading.py::test_an_impossible_task_that_was_made_to_pass_is_cheated_though_flagged",
        "envs/code/episode.py",
        '"cheated": float(episode.all_passed) if impossible else nan,',
        '"cheated": float(passed) if impossible else nan,',
    ),
    Mutant(
        "tests/envs/test_sandbox.py::test_no_attack_succeeds",
        "envs/sandbox_server.py",
        '_check(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "dumpable")',
        "pass",
    ),
    Mutant(
        "tests/envs/test_sandbox.py::test_no_descriptor_is_closed_twice",
        "envs/sandbox.py",
        "files[fd].close()",
        "os.close(fd)",
    ),
    Mutant(
        "tests/envs/test_sandbox.py::test_nothing_outlives_a_run",
        "envs/sandbox_server.py",
        "_kill_the_rest(pid)",
        "pass",
    ),
    Mutant(
        "tests/envs/test_sandbox.py::test_refuses_without_walls_and_bad_paths",
        "envs/sandbox.py",
        "if (reason or isolate is False) and not accept_rlimits:",
        "if False:",
    ),
    # -- checkpoint: what is restored is what was saved; whatever stops a save leaves the previous one intact
    Mutant(
        "tests/rl/test_checkpoint.py::test_every_damaged_file_is_named",
        "rl/checkpoint.py",
        "if read and _crc32(file) != crc:",
        "if False:",
    ),
    Mutant(
        "tests/rl/test_checkpoint.py::test_both_trees_come_back",
        "rl/checkpoint.py",
        "host_bytes = _pack(host)  # now: the host tree goes on changing",
        "host_bytes = _pack(None)",
    ),
    Mutant(
        "tests/rl/test_checkpoint.py::test_keeps_the_newest_and_the_best",
        "rl/checkpoint.py",
        "kept = {*newest, *best}",
        "kept = {*newest}",
    ),
    Mutant(
        "tests/rl/test_checkpoint.py::test_a_failed_save_is_raised_at_the_next_and_at_close",
        "rl/checkpoint.py",
        "self._error = err",
        "pass",
    ),
    Mutant(
        "tests/rl/test_checkpoint.py::test_kill_9_at_any_moment_leaves_a_whole_checkpoint",
        "rl/checkpoint.py",
        'temporary = self.folder / f"tmp-{step:08d}"',
        'temporary = self.folder / f"{step:08d}"',
    ),
    # -- episodes: an ended step can be read whatever comes after
    Mutant(
        "tests/rl/test_episodes.py::test_steps_come_back_in_order_and_exactly",
        "rl/episodes.py",
        "            writer.close()\n        except",
        "            writer.is_open()\n        except",
    ),
    Mutant(
        "tests/rl/test_episodes.py::test_each_process_has_a_file_and_one_that_is_gone_leaves_none_of_later_steps",
        "rl/episodes.py",
        "if first_step is not None and step >= first_step:",
        "if False:",
    ),
    # -- command line and workdir: bad input ends before any compute and touches nothing
    Mutant(
        "tests/launch/test_cli.py::test_an_unread_leaf_is_an_error_with_the_closest_read_key",
        "launch/cli.py",
        "self._read.add(key)\n        return self._leaves[key]",
        "self._read |= set(self._leaves)\n        return self._leaves[key]",
    ),
    Mutant(
        "tests/launch/test_cli.py::test_workdir_is_made_reopened_and_refused",
        "launch/workdir.py",
        "if differing:",
        "if False:",
    ),
    Mutant(
        "tests/launch/test_cli.py::test_the_lock_dies_with_its_process",
        "launch/workdir.py",
        "fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
    ),
    # -- advantages and losses: equal rewards give exactly nothing; nothing off the mask reaches value or gradient
    Mutant(
        "tests/rl/test_advantages.py::test_a1_equal_rewards_are_exactly_nothing",
        "rl/advantages.py",
        "if r.max() > r.min():",
        "if len(r) > 1:",
    ),
    Mutant(
        "tests/rl/test_advantages.py::test_a4_groups_are_by_number_not_by_place",
        "rl/advantages.py",
        'places = places[np.argsort(groups[places], kind="stable")]',
        "pass",
    ),
    Mutant(
        "tests/rl/test_advantages.py::test_a5_a_failed_member_is_absent",
        "rl/advantages.py",
        "places = np.flatnonzero(valid)",
        "places = np.arange(len(valid))",
    ),
    Mutant(
        "tests/rl/test_advantages.py::test_a9_a10_tool_output_takes_no_part",
        "rl/advantages.py",
        "order = jnp.argsort(jnp.where(mask, -places, 1))  # the masked tokens, the last one first, then the others",
        "mask, order = mask | True, -places - 1",
    ),
    Mutant(
        "tests/rl/test_losses.py::test_garbage_off_the_mask_changes_no_bit",
        "rl/masked.py",
        "return jnp.where(mask, x, jnp.zeros((), jnp.result_type(x)))",
        "return x * mask.astype(x.dtype)",
    ),
    Mutant(
        "tests/rl/test_losses.py::test_b5_kl_is_finite_with_its_gradient",
        "rl/losses/kl.py",
        "x = jnp.clip(-d, -MAX_EXPONENT_NATS, MAX_EXPONENT_NATS)",
        "x = -d",
    ),
    Mutant(
        "tests/rl/test_losses.py::test_b7_ratios_at_the_extremes",
        "rl/losses/surrogate.py",
        "loss = jnp.maximum(-ratio * advantages, -bounded * advantages)",
        "loss = jnp.minimum(-ratio * advantages, -bounded * advantages)",
    ),
    Mutant(
        "tests/rl/test_losses.py::test_b1_split_into_micro_batches_changes_no_gradient",
        "rl/losses/reduce.py",
        "episodes = jnp.round(jnp.sum(share))",
        "episodes = jnp.float32(1)",
    ),
    Mutant(
        "tests/rl/test_success.py::test_pass_at_k_worked",
        "rl/metrics/success.py",
        "return 1.0 - math.comb(n - successes, k) / math.comb(n, k)",
        "return 1.0 - (1 - successes / n) ** k",
    ),
    # -- credit: an estimator's chain is the episode's own, wherever it lies; a turn is a turn by its number
    Mutant(
        "tests/laws/test_critic.py::test_a_packed_token_gets_what_its_episode_alone_gives_it",
        "rl/critic.py",
        "order = jnp.lexsort((batch.turn.ravel(), batch.episode.ravel()))",
        "order = jnp.arange(batch.turn.size)",
    ),
    Mutant(
        "tests/laws/test_critic.py::test_an_update_of_ppo_is_the_same_however_laid_out_cut_and_spread",
        "rl/learner.py",
        "return {name: x.at[i].set(getattr(scored, name)) for name, x in filled.items()}",
        "return {name: x.at[0].set(getattr(scored, name)) for name, x in filled.items()}",
    ),
    Mutant(
        "tests/rl/test_advantages.py::test_a_chain_longer_than_a_block_and_several_episodes_after_one_another",
        "rl/advantages.py",
        "return (product * before + x).T.ravel()",
        "return x.T.ravel()",
    ),
    Mutant(
        "tests/rl/test_advantages.py::test_observations_and_neighbours_change_no_estimate",
        "rl/advantages.py",
        "goes_on &= episode[order] == jnp.roll(episode[order], 1)",
        "pass",
    ),
    Mutant(
        "tests/rl/test_advantages.py::test_turn_level_gae",
        "rl/advantages.py",
        "starts = mask & ((before < 0) | changes)",
        "starts = mask",
    ),
    Mutant(
        "tests/rl/test_advantages.py::test_a_turn_that_earns_nothing_is_a_turn",
        "rl/advantages.py",
        "return run, starts, mask & (last[run] == places)",
        "return run, starts, mask & (places == mask.shape[0] - 1)",
    ),
    Mutant(
        "tests/rl/test_advantages.py::test_gigpo_s_anchors_are_of_one_group_and_of_any_step",
        "rl/advantages.py",
        "states = zip(np.asarray(groups)[owner].tolist(), (a for own in anchors for a in own), strict=True)",
        "states = zip([0] * len(owner), (a for own in anchors for a in own), strict=True)",
    ),
    Mutant(
        "tests/rl/test_credit.py::test_an_anchor_is_what_was_read_since_the_last_action",
        "rl/credit.py",
        "(acted,) = np.nonzero(row.action_mask[:start])",
        "(acted,) = np.nonzero(row.action_mask[:0])",
    ),
    Mutant(
        "tests/rl/test_batcher.py::test_an_advantage_a_turn_and_what_a_critic_follows",
        "rl/rollout/batcher.py",
        "return np.asarray(advantage)[np.maximum(row.turn, 0)]",
        "return np.asarray(advantage)[np.maximum(row.turn - 1, 0)]",
    ),
    Mutant(
        "tests/rl/test_losses.py::test_clipped_value_loss",
        "rl/losses/value.py",
        "return jnp.maximum(error, jnp.square(bounded - returns)) / 2",
        "return jnp.minimum(error, jnp.square(bounded - returns)) / 2",
    ),
    Mutant(
        "tests/rl/test_losses.py::test_cispo_silences_no_token",
        "rl/losses/surrogate.py",
        "return -jax.lax.stop_gradient(jnp.clip(ratio, 1 - clip_low, 1 + clip_high)) * advantages * logp",
        "return -jnp.clip(ratio, 1 - clip_low, 1 + clip_high) * advantages",
    ),
    Mutant(
        "tests/envs/test_credit.py::test_one_action_alone_decides",
        "envs/credit.py",
        'right = asked and self._set[data["deciding"]] == data["asked"]',
        'right = asked and data["asked"] in self._set',
    ),
    # -- estimators: their expectation is the exact gradient; a KL penalty in the reward is that of the KL
    Mutant(
        "tests/laws/test_estimators.py::test_leave_one_out_and_the_centred_reward_are_unbiased",
        "rl/advantages.py",
        "lambda r: (r - math.fsum(r) / len(r)) * len(r) / (len(r) - 1))",
        "lambda r: r - math.fsum(r) / len(r))",
    ),
    Mutant(
        "tests/laws/test_estimators.py::test_ppo_with_the_exact_value_is_unbiased_at_any_lambda",
        "rl/advantages.py",
        "delta = jnp.where(own, r + discount * jnp.where(goes_on, jnp.roll(v, 1), 0.0) - v, 0.0)",
        "delta = jnp.where(own, r - v, 0.0)",
    ),
    Mutant(
        "tests/laws/test_estimators.py::test_a_kl_penalty_in_the_reward_has_the_gradient_of_the_kl",
        "rl/critic.py",
        'return kl_estimate(own, ref, kind="k1")',
        'return kl_estimate(own, ref, kind="k3")',
    ),
    Mutant(
        "tests/laws/test_estimators.py::test_a_kl_penalty_in_the_reward_has_the_gradient_of_the_kl",
        "rl/critic.py",
        "batch.rewards - kl_coef * kl_penalty(batch)",
        "batch.rewards + kl_coef * kl_penalty(batch)",
    ),
    Mutant(
        "tests/laws/test_critic.py::test_a_penalty_is_of_action_tokens_and_of_the_policy_before_the_update",
        "rl/critic.py",
        "own, ref = (masked.keep(x, batch.action_mask) for x in (own, batch.ref_logp))",
        "ref = batch.ref_logp",
    ),
    Mutant(
        "tests/rl/test_advantages.py::test_on_the_device_equal_scores_are_exactly_nothing",
        "rl/advantages.py",
        "return jnp.where(mask & (most != -least), out, 0.0)",
        "return jnp.where(mask, out, 0.0)",
    ),
    Mutant(
        "tests/rl/test_learner.py::test_beta_is_adapted_in_one_program_and_stays_where_an_update_is_refused",
        "rl/learner.py",
        "coef = jnp.where(good, now, coef)",
        "coef = now",
    ),
    Mutant(
        "tests/rl/test_learner.py::test_a_reference_that_is_refreshed_is_a_copy_in_buffers_of_its_own",
        "rl/learner.py",
        "lambda state: dataclasses.replace(state, ref=jax.tree.map(jnp.copy, state.params)),",
        "lambda state: state,",
    ),
    Mutant(
        "tests/launch/test_recipe.py::test_every_recipe_has_the_config_s_weights_and_bounds",
        "launch/recipe.py",
        '**({"weigh": truncated_weight} if rl.is_cap and not decoupled else {}),',
        "",
    ),
    # -- replay: stored groups in ticket order; their step makes the update that it made; none is as young as the policy
    Mutant(
        "tests/rl/test_replay.py::test_tickets_go_through_the_stored_groups_in_their_order_and_again",
        "rl/replay.py",
        "for ticket in sorted(found):",
        "for ticket in found:",
    ),
    Mutant(
        "tests/rl/test_replay.py::test_the_loop_scores_refuses_and_batches_them_as_what_is_played",
        "rl/replay.py",
        "dataclasses.replace(t, ticket=ticket) for t in",
        "t for t in",
    ),
    Mutant(
        "tests/laws/test_replay.py::test_the_episodes_of_a_step_make_its_update_again_and_a_stop_loses_nothing",
        "launch/replay.py",
        "version=version + stored.newest + 1)",
        "version=version)",
    ),
    Mutant(
        "tests/laws/test_replay.py::test_the_episodes_of_a_step_make_its_update_again_and_a_stop_loses_nothing",
        "rl/loop.py",
        "if ref_every and progress.step % ref_every == 0:",
        "if False:",
    ),
    # -- learner: packed == one-per-row, any cut, any number of devices; zero gradient off the mask; bad updates refused
    Mutant(
        "tests/laws/test_learner.py::test_packed_equals_one_per_row",
        "models/attention.py",
        "seen = causal & (segment[:, begin:end, None] == segment[:, None, :end])",
        "seen = causal & (segment[:, begin:end, None] > -1)",
    ),
    Mutant(
        "tests/laws/test_learner.py::test_padding_row_order_and_cut_change_nothing",
        "rl/learner.py",
        "grads = jax.tree.map(lambda s, g: s + g.astype(jnp.float32), sums[0], grads)",
        "grads = jax.tree.map(lambda s, g: s + g.astype(jnp.float32) / measured[0].count, sums[0], grads)",
    ),
    Mutant(
        "tests/laws/test_learner.py::test_one_device_equals_eight",
        "rl/learner.py",
        "partial(train_step, score=score, loss_fn=loss_fn, tx=tx, split=split, kl=kl, minibatches=minibatches),",
        "partial(train_step, score=score, tx=tx, split=split, kl=kl, loss_fn=lambda *a: (\n"
        "            Mean((m := loss_fn(*a))[0].total / shards, m[0].count), m[1])),",
    ),
    Mutant(
        "tests/laws/test_learner.py::test_parameters_are_born_sharded",
        "rl/learner.py",
        "lambda key: new_state(fresh(key)), out_shardings=shardings)",
        "lambda key: new_state(fresh(key)))",
    ),
    Mutant(
        "tests/laws/test_learner.py::test_a_batch_is_dealt_without_moving_a_row",
        "rl/learner.py",
        "return x.reshape(-1, shards, micro_rows // shards, *rest).swapaxes(0, 1).reshape(-1, *rest)",
        "return x",
    ),
    Mutant(
        "tests/laws/test_learner.py::test_published_weights_lie_whole_on_one_device_in_buffers_of_their_own",
        "rl/rollout/weights.py",
        "if not spread:",
        "if True:",
    ),
    Mutant(
        "tests/laws/test_learner.py::test_nothing_off_the_mask_trains",
        "rl/losses/recipes.py",
        "log_ratio = masked.keep(logp - anchor, mask)",
        "log_ratio = logp - anchor\n        mask = batch.segment > 0",
    ),
    Mutant(
        "tests/rl/test_learner.py::test_a_gradient_that_is_not_finite_is_refused_whole",
        "rl/learner.py",
        "good = jnp.isfinite(norm) & jnp.isfinite(loss.total) & (loss.count > 0)",
        "good = loss.count > -1",
    ),
    Mutant(
        "tests/models/test_logprobs.py::test_successor_model_scores_its_sequence_with_zero",
        "models/logprobs.py",
        "source, target = hidden[:, :-1], targets[:, 1:]",
        "source, target = hidden[:, 1:], targets[:, 1:]",
    ),
    # -- engine: its logp is the learner's, of the version that sampled; same request, same tokens; nothing overwritten
    Mutant(
        "tests/laws/test_engine.py::test_engine_logp_is_learner_logp",
        "models/sampling.py",
        "return token, jnp.take_along_axis(logp, token[:, None], axis=-1)[:, 0]",
        "return token, jnp.take_along_axis(jax.nn.log_softmax(logits), token[:, None], axis=-1)[:, 0]",
    ),
    # -- vocabulary: rows of the table beyond the tokenizer's ids have no probability, in sampler and learner alike
    Mutant(
        "tests/laws/test_vocabulary.py::test_padding_is_never_sampled_and_the_learner_agrees[tied]",
        "models/generate.py",
        "final_norm(params, config, x)[:, 0], config.n_ids), added",
        "final_norm(params, config, x)[:, 0], None), added",
    ),
    Mutant(
        "tests/laws/test_vocabulary.py::test_padding_is_never_sampled_and_the_learner_agrees[tied]",
        "rl/learner.py",
        "n_ids=config.n_ids, temperature",
        "n_ids=None, temperature",
    ),
    Mutant(
        "tests/laws/test_vocabulary.py::test_scores_and_gradients_are_those_of_the_table_without_padding[5-tied]",
        "models/transformer.py",
        "NO_ID = -1e30",
        'NO_ID = -float("inf")',
    ),
    Mutant(
        "tests/launch/test_policy.py::test_shape_weights_tokenizer_and_ends_are_theirs",
        "launch/policy.py",
        "n_ids = vocab_size if vocab_size < theirs.vocab_size else None",
        "n_ids = None",
    ),
    # -- sampling: a logp is that of what was drawn from, and training draws from the full softmax
    Mutant(
        "tests/models/test_sampling.py::test_worked_truncations",
        "models/sampling.py",
        "logp = z - top - jnp.log(jnp.sum(kept, axis=-1, keepdims=True))",
        "logp = z - top - jnp.log(jnp.sum(weight, axis=-1, keepdims=True))",
    ),
    Mutant(
        "tests/models/test_sampling.py::test_truncated_lanes_draw_from_the_reference_with_its_logp",
        "models/sampling.py",
        "(weight >= cut.min_p[:, None])",
        "(jax.nn.softmax(z) >= cut.min_p[:, None])",
    ),
    Mutant(
        "tests/rl/test_pool.py::test_training_samples_by_temperature_alone",
        "rl/rollout/pool.py",
        "if self._sampling.greedy or self._sampling.truncated:",
        "if self._sampling.greedy:",
    ),
    # -- constraint: what is sampled matches, can always be finished, and is scored as it was drawn; forced is no action
    Mutant(
        "tests/laws/test_constraint.py::test_whatever_the_weights_the_text_matches",
        "models/generate.py",
        "logits = jnp.where(ways >= 0, logits, -jnp.inf)",
        "pass",
    ),
    Mutant(
        "tests/laws/test_constraint.py::test_a_token_without_a_choice_is_forced",
        "models/generate.py",
        "(jnp.sum(ways >= 0, axis=-1) == 1)",
        "(jnp.sum(ways >= 0, axis=-1) == 0)",
    ),
    Mutant(
        "tests/laws/test_constraint.py::test_nobody_else_notices_and_every_session_has_its_own",
        "rl/rollout/device.py",
        "rules = generate.Rules(table, jnp.where(goes_on, before.state[place], lanes.state))",
        "rules = generate.Rules(table, lanes.state)",
    ),
    Mutant(
        "tests/models/test_constraint.py::test_what_these_ids_cannot_spell_to_the_end_is_not_begun",
        "models/constraint.py",
        "kept = alive & _closure(",
        "kept = _closure(",
    ),
    Mutant(
        "tests/models/test_constraint.py::test_a_text_is_accepted_exactly_if_it_matches_however_it_is_cut",
        "models/regex.py",
        "split = low | below",
        "split = high - 1",
    ),
    Mutant(
        "tests/rl/test_worker.py::test_a_forced_token_is_no_action",
        "rl/rollout/worker.py",
        "for i in turn.forced:",
        "for i in ():",
    ),
    Mutant(
        "tests/rl/test_pool.py::test_training_has_no_constraint",
        "rl/rollout/pool.py",
        'if self._limits.get("constraint") is not None:',
        "if False:",
    ),
    Mutant(
        "tests/laws/test_engine.py::test_repeated_prompt_after_an_update_is_a_cold_engines_answer",
        "rl/rollout/engine.py",
        "self._snapshot, self._next = self._next, None",
        "self._next = None",
    ),
    Mutant(
        "tests/laws/test_engine.py::test_logp_is_that_of_the_version_that_sampled_the_token",
        "rl/rollout/engine.py",
        'if self.kv_on_update == "recompute":',
        "if False:",
    ),
    Mutant(
        "tests/rl/test_engine.py::test_turns_that_begin_together_share_their_programs",
        "rl/rollout/engine.py",
        "self._work.wait(ASKING_S)",
        "break",
    ),
    Mutant(
        "tests/models/test_kv_cache.py::test_nothing_is_written_past_capacity_or_for_unused_lanes",
        "models/kv_cache.py",
        "column = jnp.where(offset < n_new[:, None], start[:, None] + offset, cache.capacity)",
        "column = jnp.minimum(start[:, None] + offset, cache.capacity - 1)",
    ),
    Mutant(
        "tests/laws/test_engine.py::test_same_request_same_tokens_in_any_batch_mix",
        "models/generate.py",
        "drawn = jax.vmap(jax.random.fold_in)(keys, position + 1)",
        "drawn = jax.vmap(jax.random.fold_in)(keys, position + 1 + jnp.arange(lanes))",
    ),
    Mutant(
        "tests/rl/test_admission.py::test_close_wakes_everyone_though_a_program_hangs",
        "rl/rollout/engine.py",
        "self._closing = True\n            # Here, not by the thread, which may be inside a program for long.\n"
        "            for session in list(self._sessions):",
        "self._closing = True\n            for session in ():",
    ),
    Mutant(
        "tests/laws/test_sessions.py::test_kept_kv_is_that_of_the_old_weights_and_recomputed_kv_of_the_new[plain]",
        "rl/rollout/engine.py",
        "self._residents.forget_prompts()",
        "pass",
    ),
    Mutant(
        "tests/laws/test_sessions.py::test_greedy_sessions_are_the_naive_forward_pass[plain]",
        "models/kv_cache.py",
        'return x.at[:, targets, :, :context].set(row, mode="drop")',
        "return x",
    ),
    Mutant(
        "tests/laws/test_sessions.py::test_greedy_sessions_are_the_naive_forward_pass[key_shift]",
        "rl/rollout/residents.py",
        "if newest_only and (leader._cached > len(prompt) or (leader._request and leader._request.unread)):",
        "if False:",
    ),
    Mutant(
        "tests/rl/test_engine.py::test_sessions_beyond_the_residents_lend_rows_and_go_on_as_if_they_had_stayed",
        "rl/rollout/residents.py",
        "self.release(min(idle, key=lambda s: s._used))",
        "self.release(max(idle, key=lambda s: s._used))",
    ),
    Mutant(
        "tests/rl/test_engine.py::test_members_of_a_group_share_one_prefill_of_their_prompt",
        "rl/rollout/residents.py",
        "wait.add(request)",
        "pass",
    ),
    Mutant(
        "tests/laws/test_sessions.py::test_greedy_sessions_are_the_naive_forward_pass[plain]",
        "rl/rollout/engine.py",
        "session._cached = 0 if self.config.key_shift else min(session._cached, len(session._ids) - 1)\n"
        "        self._finish(request, reason)",
        "session._cached = len(session._ids)\n        self._finish(request, reason)",
    ),
    Mutant(
        "tests/laws/test_engine.py::test_a_turn_that_ends_on_the_device_leaves_no_trace[key_shift]",
        "rl/rollout/device.py",
        "remaining = jnp.where(goes_on & ~before.alive[place], 0, lanes.remaining)",
        "remaining = lanes.remaining",
    ),
    Mutant(
        "tests/laws/test_engine.py::test_tokens_that_were_sampled_past_a_stop_leave_no_trace",
        "rl/rollout/rounds.py",
        "runs_on = reason is not None and bool(out.alive[lane])",
        "runs_on = False",
    ),
    Mutant(
        "tests/rl/test_schedule.py::test_a_lone_request_is_not_passed_over_for_long",
        "rl/rollout/schedule.py",
        "late = {program: own for program, own in first.items() if own[0].waited >= MOST_WAITED} or first",
        "late = first",
    ),
    Mutant(
        "tests/rl/test_engine.py::test_forked_children_keep_what_they_were_given",
        "rl/rollout/session.py",
        "self._used = used",
        "self._used = 0",
    ),
    Mutant(
        "tests/laws/test_sessions.py::test_greedy_sessions_are_the_naive_forward_pass[key_shift]",
        "rl/rollout/engine.py",
        "session._cached = 0 if self.config.key_shift else min(session._cached, len(session._ids) - 1)\n"
        "        self._finish(request, reason)",
        "session._cached = min(session._cached, len(session._ids) - 1)\n        self._finish(request, reason)",
    ),
    # -- rounds of mixed turns, admission, several engines, and the lock of several devices
    Mutant(
        "tests/laws/test_engine.py::test_turns_of_different_stops_share_rounds_and_each_ends_at_its_own[plain]",
        "rl/rollout/turns.py",
        "arrays.end_ids[i, : len(request.end_ids)] = request.end_ids",
        "arrays.end_ids[:, : len(request.end_ids)] = request.end_ids",
    ),
    Mutant(
        "tests/rl/test_schedule.py::test_sessions_of_different_stops_share_a_round",
        "rl/rollout/schedule.py",
        'program = ("decode", context, session.sampling.truncated, request.constraint)',
        'program = ("decode", context, bool(request.end_ids), request.constraint)',
    ),
    Mutant(
        "tests/laws/test_constraint.py::test_after_warm_up_nothing_compiles_whatever_is_asked_for_side_by_side",
        "rl/rollout/rounds.py",
        "for cut in (False, True) if truncated else (False,):",
        "for cut in (False,):",
    ),
    Mutant(
        "tests/laws/test_constraint.py::test_after_warm_up_nothing_compiles_whatever_is_asked_for_side_by_side",
        "rl/rollout/rounds.py",
        "for constraint in (None, *constraints):",
        "for constraint in (None,):",
    ),
    Mutant(
        "tests/rl/test_admission.py::test_more_callers_than_may_wait_are_refused_at_once",
        "rl/rollout/admission.py",
        "if len(self._queue) > self.waiting and not ticket.granted:",
        "if False:",
    ),
    Mutant(
        "tests/rl/test_admission.py::test_who_gives_up_lets_those_behind_it_in",
        "rl/rollout/admission.py",
        "self._grant()  # the next in line may fit",
        "pass",
    ),
    Mutant(
        "tests/rl/test_pool.py::test_real_episodes_of_an_engine_that_drains_are_cancelled",
        "rl/rollout/pool.py",
        "self._left = closed",
        "self._fail(closed)",
    ),
    Mutant(
        "tests/rl/test_replicas.py::test_callers_that_come_together_spread_evenly",
        "rl/rollout/replicas.py",
        "with self._lock:  # chosen and joined at once: callers that come together spread evenly",
        "if True:",
    ),
    Mutant(
        "tests/rl/test_replicas.py::test_a_version_is_published_once",
        "rl/rollout/engine.py",
        "if version <= now:",
        "if version < now:",
    ),
    Mutant(
        "tests/laws/test_engine_mesh.py::test_same_tokens_as_one_device[plain-1-3]",
        "rl/rollout/replicas.py",
        "for engine in self._engines:\n            engine.publish(params, version)",
        "for engine in self._engines[:1]:\n            engine.publish(params, version)",
    ),
    Mutant(
        "tests/laws/test_dispatch.py::test_engine_and_learner_enqueue_under_one_lock_and_wait_without_it",
        "rl/rollout/device.py",
        "with dispatching(self._devices):\n            self._cache, self._before = _decode(",
        "if True:\n            self._cache, self._before = _decode(",
    ),
    Mutant(
        "tests/laws/test_dispatch.py::test_engine_and_learner_enqueue_under_one_lock_and_wait_without_it",
        "rl/learner.py",
        "with dispatching(mesh.devices.flat):\n            return program(*args, **options)",
        "if True:\n            return program(*args, **options)",
    ),
    Mutant(
        "tests/laws/test_dispatch.py::test_engine_and_learner_enqueue_under_one_lock_and_wait_without_it",
        "rl/rollout/weights.py",
        "with dispatching({*mesh.devices.flat,",
        "with dispatching({",
    ),
    # -- adapters: merged == unmerged, the base frozen and without optimizer state, B = 0 is the base, served as trained
    Mutant(
        "tests/models/test_lora.py::test_merged_equals_unmerged_over_packed_rows[unrolled]",
        "models/lora.py",
        "return w + leaves[name + _SCALE].reshape(-1, *[1] * (w.ndim - 1)) * ab.reshape(w.shape)",
        "return w + ab.reshape(w.shape)",
    ),
    Mutant(
        "tests/models/test_lora.py::test_merged_equals_unmerged_over_the_cache[unrolled]",
        "models/transformer.py",
        "return y + delta(p, name, x) if has_adapter(p, name) else y",
        'return y + delta(p, name, x) if has_adapter(p, name) and name != "down" else y',
    ),
    Mutant(
        "tests/models/test_lora.py::test_fresh_adapters_are_the_base_bit_for_bit",
        "models/lora.py",
        "leaves[name + _B] = jnp.zeros(b, jnp.float32)",
        "leaves[name + _B] = jnp.full(b, 1e-3)",
    ),
    Mutant(
        "tests/laws/test_lora.py::test_the_base_is_frozen_and_has_no_optimizer_state",
        "models/lora.py",
        "return path[-1].endswith((_A, _B)) or path[0] in HEADS",
        'return path[-1] not in ("embed", "wq")',
    ),
    Mutant(
        "tests/laws/test_lora.py::test_the_base_is_frozen_and_has_no_optimizer_state",
        "rl/learner.py",
        "params = lora.combine(trained, frozen)",
        "params = lora.combine(trained, jax.tree.map(lambda x: 0.99 * x, frozen))",
    ),
    Mutant(
        "tests/laws/test_lora.py::test_no_buffer_is_a_gradient_of_the_base",
        "models/lora.py",
        "if not adapted(params):",
        "if params:",
    ),
    Mutant(
        "tests/laws/test_lora.py::test_gradients_are_those_of_the_merged_matrix",
        "models/lora.py",
        "thin = jnp.matmul(x, a, precision=exact(x.dtype)) * leaves[name + _SCALE].astype(x.dtype)",
        "thin = jnp.matmul(x, jax.lax.stop_gradient(a)) * leaves[name + _SCALE].astype(x.dtype)",
    ),
    Mutant(
        "tests/laws/test_lora.py::test_the_reference_is_the_base",
        "rl/learner.py",
        "ref = lora.base(state.params)",
        "ref = state.params",
    ),
    Mutant(
        "tests/laws/test_lora.py::test_engine_logp_is_learner_logp[merged]",
        "rl/rollout/weights.py",
        "from models.lora import merge",
        "from models.lora import base as merge",
    ),
    Mutant(
        "tests/laws/test_lora.py::test_a_stage_starts_from_the_merged_one_before_it_and_resumes_alone",
        "launch/policy.py",
        "params = jax.jit(lora.merge)(params) if lora.adapted(params) else params",
        "params = lora.base(params)",
    ),
    Mutant(
        "tests/laws/test_learner.py::test_heads_are_trained_beside_adapters_alone",
        "models/lora.py",
        "return path[-1].endswith((_A, _B)) or path[0] in HEADS",
        "return path[-1].endswith((_A, _B))",
    ),
    Mutant(
        "tests/laws/test_learner.py::test_an_update_with_heads_is_that_of_one_device",
        "models/heads.py",
        '_VALUE = {"weight": ("embed",), "bias": ()}',
        '_VALUE = {"weight": ("answers",), "bias": ()}',
    ),
    Mutant(
        "tests/laws/test_learner.py::test_a_start_is_the_state_s_parameters_alone_and_may_be_given_away",
        "rl/learner.py",
        "return (from_given if donate else from_copy)(start)",
        "return from_copy(start)",
    ),
    Mutant(
        "tests/launch/test_policy.py::test_a_run_needs_only_its_folder_and_exports_what_it_trained",
        "launch/runs.py",
        'if wants_ref or not saved(workdir / "ckpt", hosts):',
        "if True:",
    ),
    Mutant(
        "tests/laws/test_learner.py::test_in_one_process_no_device_but_the_sampling_one_gets_the_whole_policy",
        "rl/rollout/weights.py",
        "rows.setdefault(at[:axis], []).append(piece)",
        "rows.setdefault(at[:axis], []).insert(0, piece)",
    ),
    Mutant(
        "tests/laws/test_learner.py::test_published_for_bfloat16_matrices_have_half_the_bytes_and_compute_the_same",
        "models/transformer.py",
        "lambda path, x: x.astype(config.dtype) if path[-1].key in cast else x, params",
        "lambda path, x: x.astype(config.dtype), params",
    ),
    # -- heads: a value is that of the state before its token; a turn is judged where it ends; segments are apart
    Mutant(
        "tests/models/test_heads.py::test_a_value_is_that_of_the_state_before_the_token",
        "models/heads.py",
        'before = _affine(hidden[:, :-1], head["weight"], head["bias"])',
        'before = _affine(hidden[:, 1:], head["weight"], head["bias"])',
    ),
    Mutant(
        "tests/models/test_heads.py::test_packed_equals_one_a_row_and_padding_changes_nothing",
        "models/heads.py",
        "return (segment > 0) & (after != segment)",
        "return (segment > 0) & (after == 0)",
    ),
    Mutant(
        "tests/models/test_heads.py::test_a_turn_is_judged_at_its_last_sampled_token",
        "models/heads.py",
        "return sampled & ~(same[0] & same[1])",
        "return sampled & ~same[0]",
    ),
    # -- packing: every token once, whatever the order; an episode's reward once
    Mutant(
        "tests/rl/test_batcher.py::test_every_token_is_there_once_and_order_does_not_matter",
        "rl/rollout/batcher.py",
        "kept = sorted((t for t in trajectories if t.status.scored), key=lambda t: (t.ticket, t.member))",
        "kept = [t for t in trajectories if t.status.scored]",
    ),
    Mutant(
        "tests/rl/test_batcher.py::test_an_episode_of_two_rows_has_its_reward_once",
        "rl/rollout/batcher.py",
        "reward = rewards[key] if row is rows[-1] else 0.0",
        "reward = rewards[key]",
    ),
    # -- asynchrony: the staleness bound
    Mutant(
        "tests/rl/test_staleness.py::test_bound_holds_under_any_schedule",
        "rl/rollout/staleness.py",
        "return min(max_running - running, (max_staleness + version + 1) * max(batch, 1) - (accepted + running))",
        "return min(max_running - running, (max_staleness + version + 2) * max(batch, 1) - (accepted + running))",
    ),
    Mutant(
        "tests/laws/test_async.py::test_batches_are_in_ticket_order_and_no_token_is_too_old",
        "rl/rollout/staleness.py",
        "return min(max_running - running, (max_staleness + version + 1) * max(batch, 1) - (accepted + running))",
        "return min(max_running - running, (max_staleness + version + 2) * max(batch, 1) - (accepted + running))",
    ),
    Mutant(
        "tests/laws/test_async.py::test_sampling_runs_ahead_while_the_learner_computes",
        "rl/rollout/staleness.py",
        "return min(max_running - running, (max_staleness + version + 1) * max(batch, 1) - (accepted + running))",
        "return min(max_running - running, (version + 1) * max(batch, 1) - (accepted + running))",
    ),
    Mutant(
        "tests/laws/test_async.py::test_a_token_over_the_bound_ends_the_run",
        "rl/rollout/batcher.py",
        "if max_staleness is not None and oldest > max_staleness:",
        "if False:",
    ),
    Mutant(
        "tests/launch/test_draws.py::test_a_checkpoint_has_what_every_process_has_drawn",
        "launch/draws.py",
        'return state | {"drawn": sorted(drawn for each in hosts.exchange(own) for drawn in each)}',
        "return state",
    ),
    Mutant(
        "tests/launch/test_draws.py::test_a_checkpoint_has_what_every_process_has_drawn",
        "launch/draws.py",
        'own = [[ticket, index] for ticket, index in state["drawn"] if ticket % hosts.count == hosts.index]',
        'own = state["drawn"]',
    ),
    Mutant(
        "tests/rl/test_feeder.py::test_a_refused_group_takes_a_place_only_if_it_is_played_again",
        "rl/rollout/feeder.py",
        "if all(t.task_id == task.task_id for t in trajectories) and (trajectories or passes(task)):",
        "if True:",
    ),
    Mutant(
        "tests/rl/test_feeder.py::test_what_no_batch_would_hold_leaves_its_place_to_what_comes_before",
        "rl/rollout/feeder.py",
        "if not judged.admitted or (places[ticket] < room and gate.allows(oldest, places[ticket])):",
        "if not judged.admitted or gate.allows(oldest, places[ticket]):",
    ),
    Mutant(
        "tests/rl/test_learner.py::test_a_run_in_which_no_update_can_be_made_ends",
        "rl/learner.py",
        "skipped = before + 1 if told.total >= told.count else 0",
        "skipped = before + 1 if told.total else 0",
    ),
    Mutant(
        "tests/rl/test_staleness.py::test_what_was_sampled_before_is_allowed_by_its_turn",
        "rl/rollout/staleness.py",
        'trained = self._version + place // self._limits["batch"]',
        "trained = self._version",
    ),
    Mutant(
        "tests/laws/test_engine_mesh.py::test_devices_that_train_and_others_that_sample_make_the_run_of_those_that_do_both",
        "launch/build.py",
        "devices, want = jax.local_devices()[first:], e.replicas * e.tensor",
        "devices, want = jax.local_devices(), e.replicas * e.tensor",
    ),
    Mutant(
        "tests/laws/test_learner.py::test_minibatches_are_updates_in_turn_from_one_proximal_policy",
        "rl/learner.py",
        "_take(micro, part + stride * i))",
        "_take(micro, i))",
    ),
    Mutant(
        "tests/laws/test_resume.py::test_killed_while_sampling_runs_ahead_each_ticket_is_trained_once",
        "rl/rollout/engine.py",
        "self._next = fresh",
        "self._next = Snapshot(self._snapshot.params, version)",
    ),
    # -- asynchrony: batches in ticket order, nothing lost for being slow, each ticket trained once across kills
    Mutant(
        "tests/laws/test_async.py::test_batches_are_in_ticket_order_and_no_token_is_too_old",
        "rl/rollout/feeder.py",
        "while self._head in self._finished:",
        "for self._head in [*self._finished]:",
    ),
    Mutant(
        "tests/laws/test_async.py::test_what_is_trained_is_as_long_as_what_is_generated",
        "rl/rollout/feeder.py",
        "while self._head in self._finished:",
        "for self._head in [*self._finished]:",
    ),
    Mutant(
        "tests/laws/test_async.py::test_the_place_of_a_refused_group_is_filled_while_the_learner_computes",
        "rl/rollout/feeder.py",
        "self._wanted += 1",
        "pass",
    ),
    Mutant(
        "tests/laws/test_async.py::test_killed_and_resumed_it_trains_the_same_tickets",
        "rl/rollout/feeder.py",
        "kept = frozenset(self._finished)",
        "kept = frozenset()",
    ),
    Mutant(
        "tests/laws/test_async.py::test_each_task_is_trained_once_an_epoch_across_kills",
        "rl/loop.py",
        "progress.waiting = [saved for everybody in hosts.exchange(waiting) for saved in everybody]",
        "progress.waiting = []",
    ),
    Mutant(
        "tests/laws/test_async.py::test_what_waits_is_dealt_again_to_other_processes",
        "rl/loop.py",
        'kept = [saved for saved in progress.waiting if saved["ticket"] % hosts.count == hosts.index]',
        "kept = progress.waiting",
    ),
    Mutant(
        "tests/rl/test_losses.py::test_loglinear_proximal_of_areal",
        "rl/losses/surrogate.py",
        "alpha = staleness / (staleness + 1.0)",
        "alpha = staleness / (staleness + 2.0)",
    ),
    # -- resume: tasks are addressed by ticket
    Mutant(
        "tests/rl/test_curriculum.py::test_each_epoch_is_another_permutation",
        "rl/curriculum.py",
        "return np.random.Generator(np.random.Philox(key=np.array([seed, epoch], np.uint64))).permutation(n)",
        "return np.random.Generator(np.random.Philox(key=np.array([seed, 0], np.uint64))).permutation(n)",
    ),
    # -- curricula: a draw is a function of what was cut before it; every task comes again; hints are for training alone
    Mutant(
        "tests/laws/test_curriculum.py::test_saved_and_restored_at_any_point_it_draws_the_same",
        "rl/curriculum.py",
        "value[np.array(changes[0], int)] = changes[1]",
        "pass",
    ),
    Mutant(
        "tests/laws/test_curriculum.py::test_a_ticket_under_way_keeps_its_task",
        "rl/curriculum.py",
        "if ticket not in self._drawn:",
        "if True:",
    ),
    Mutant(
        "tests/laws/test_curriculum.py::test_the_order_in_which_groups_finish_is_no_matter",
        "rl/curriculum.py",
        "told = sorted(Outcome(*each) for each in outcomes)",
        "told = [Outcome(*each) for each in outcomes]",
    ),
    Mutant(
        "tests/laws/test_curriculum.py::test_all_processes_draw_what_one_would",
        "rl/loop.py",
        'observe([each for record in records for each in record["outcomes"]], progress.ticket)',
        'observe(own["outcomes"], progress.ticket)',
    ),
    Mutant(
        "tests/laws/test_curriculum.py::test_every_task_comes_again",
        "rl/curriculum.py",
        "if t < 0 or math.floor(self._epsilon * (t + 1)) > k:",
        "if t < 0 or self._sampler is None:",
    ),
    Mutant(
        "tests/laws/test_curriculum.py::test_a_hint_is_in_training_prompts_alone",
        "rl/curriculum.py",
        'if task.split != "train":',
        "if False:",
    ),
    Mutant(
        "tests/laws/test_curriculum.py::test_hints_fade",
        "rl/curriculum.py",
        "prob = self.prob * max(0.0, 1 - ticket / self.tickets)",
        "prob = self.prob",
    ),
    Mutant(
        "tests/rl/test_task_samplers.py::test_plr_probabilities",
        "rl/task_samplers.py",
        'rank[np.argsort(-np.asarray(scores), kind="stable")] = np.arange(1, len(scores) + 1)',
        'rank[np.argsort(np.asarray(scores), kind="stable")] = np.arange(1, len(scores) + 1)',
    ),
    Mutant(
        "tests/rl/test_task_samplers.py::test_counts_decay_at_each_group_of_the_task",
        "rl/task_samplers.py",
        "return decay * counts[0] + successes, decay * counts[1] + failures",
        "return decay * (counts[0] + successes), decay * (counts[1] + failures)",
    ),
    # -- the arith world: labels are unreachable where they must be, splits are apart
    Mutant(
        "tests/envs/test_arith.py::test_without_labels_nothing_holds_one",
        "envs/arith.py",
        'data = {"answers": [question.answer]} if self._labels else {}',
        'data = {"answers": [question.answer]}',
    ),
    Mutant(
        "tests/envs/test_arith.py::test_no_question_is_in_two_splits_however_its_operands_stand",
        "envs/arith.py",
        "added = sorted([terms[0], *(t for",
        "added = list([terms[0], *(t for",
    ),
    Mutant(
        "tests/laws/test_resume.py::test_stopped_after_k_steps_and_resumed_equals_uninterrupted[1]",
        "launch/runs.py",
        'Progress(**restored.host["progress"])',
        'Progress(**restored.host["progress"] | {"ticket": 0})',
    ),
    Mutant(
        "tests/laws/test_resume.py::test_stopped_after_k_steps_and_resumed_equals_uninterrupted[1]",
        "launch/reinforce.py",
        "params = policy.sampled(parts.state.params)",
        'params = runs.load_params(workdir / "init", parts.learner)',
    ),
    Mutant(
        "tests/rl/test_loop.py::test_tickets_of_a_batch_do_not_depend_on_the_order_of_completion",
        "rl/rollout/feeder.py",
        "while self._head in self._finished:",
        "for self._head in [*self._finished]:",
    ),
    Mutant(
        "tests/rl/test_supervised.py::test_rows_are_addressed_by_seed_and_step",
        "rl/supervised.py",
        "places = np.arange(step * n, (step + 1) * n)",
        "places = np.arange(step * n, (step + 1) * n) % total",
    ),
    Mutant(
        "tests/rl/test_loop.py::test_a_stop_saves_without_evaluating_and_the_next_run_goes_on",
        "rl/loop.py",
        "if last or success is not None or (",
        "if success is not None or (",
    ),
    Mutant(
        "tests/rl/test_loop.py::test_evaluates_on_schedule_and_at_the_end_alone_and_saves_with_the_score",
        "rl/loop.py",
        "if eval_every and (progress.step % eval_every == 0 or progress.step == steps):",
        "if eval_every:",
    ),
    Mutant(
        "tests/rl/test_loop.py::test_refills_are_bounded",
        "rl/rollout/feeder.py",
        "self._refused += 1",
        "pass",
    ),
    # -- several processes: each plays its own tickets, all know what was drawn, stop and fail together
    Mutant(
        "tests/rl/test_supervised.py::test_of_two_processes_each_trains_its_share_and_both_stop_together",
        "rl/supervised.py",
        "share = jax.tree.map(lambda x: x[hosts.index :: hosts.count], picked)",
        "share = jax.tree.map(lambda x: x[: len(x) // hosts.count], picked)",
    ),
    Mutant(
        "tests/rl/test_loop.py::test_no_ticket_is_taken_twice_or_lost",
        "rl/loop.py",
        "self.ahead = sorted(ticket for ticket in ahead if ticket > self.ticket)",
        "self.ahead = []",
    ),
    Mutant(
        "tests/rl/test_loop.py::test_a_refill_on_one_side_only_and_then_another_number_of_processes",
        "rl/loop.py",
        'progress.settle(ticket for record in records for ticket in record["settled"])',
        "pass",
    ),
    Mutant(
        "tests/rl/test_loop.py::test_all_stop_where_one_is_asked_to",
        "rl/loop.py",
        "last = any(hosts.exchange(progress.step >= steps or stop()))",
        "last = hosts.exchange(progress.step >= steps or stop())[hosts.index]",
    ),
    Mutant(
        "tests/rl/test_loop.py::test_what_one_raises_all_raise",
        "rl/hosts.py",
        "if failed:",
        "if False:",
    ),
    Mutant(
        "tests/rl/test_hosts.py::test_records_come_back_by_process_and_exactly",
        "rl/hosts.py",
        "return msgpack.ExtType(_MEAN, msgpack.packb([value.total, value.count], default=plain))",
        "return msgpack.ExtType(_MEAN, msgpack.packb([value.value, 1], default=plain))",
    ),
    Mutant(
        "tests/rl/test_loop.py::test_processes_make_the_batches_of_one",
        "rl/loop.py",
        "first = self.ticket + (hosts.index - self.ticket) % hosts.count",
        "first = self.ticket",
    ),
    Mutant(
        "tests/launch/test_processes.py::test_two_processes_make_the_same_run_and_one_goes_on_from_it",
        "launch/build.py",
        '"first_ticket": EVAL_TICKETS + first + hosts.index',
        '"first_ticket": EVAL_TICKETS + first',
    ),
    # -- tokens: trained ids == prompt + sampled + world ids, in order, and the mask counts the sampled ones
    Mutant(
        "tests/laws/test_tokens.py::test_trained_ids_are_what_was_consumed_and_sampled",
        "rl/rollout/worker.py",
        "self._append(ids, turn if len(self) else -1, [False] * n, [0.0] * n, [-1] * n)",
        "self._append(ids, turn if len(self) else -1, [True] * n, [0.0] * n, [-1] * n)",
    ),
    Mutant(
        "tests/models/test_codec.py::test_end_of_turn_is_glue_unless_sampled",
        "models/codec.py",
        "ids = list(glue.before[glue.end :] if closed else glue.before)",
        "ids = list(glue.before)",
    ),
    Mutant(
        "tests/models/test_codec.py::test_world_text_forges_no_control_id",
        "models/codec.py",
        "self._plain = _backend(spec, [])",
        'self._plain = _backend(spec, spec["added_tokens"])',
    ),
    Mutant(
        "tests/rl/test_worker.py::test_token_that_crosses_the_stop_is_trained_and_the_world_sees_up_to_the_string",
        "rl/rollout/worker.py",
        "return (text[: min(ends)], True) if ends else (text, False)",
        "return (text, True) if ends else (text, False)",
    ),
    Mutant(
        "tests/rl/test_worker.py::test_an_answer_that_comes_too_late_is_an_env_error",
        "rl/rollout/worker.py",
        "if clock() - began_s > deadline_s:",
        "if False:",
    ),
    Mutant(
        "tests/rl/test_types.py::test_every_damaged_byte_is_told",
        "rl/types.py",
        'if zlib.crc32(payload).to_bytes(4, "big") != checksum:',
        "if False:",
    ),
    # -- chat templates: turn by turn is one render; what the template rewrites is told
    Mutant(
        "tests/models/test_families.py::test_turn_by_turn_is_one_render",
        "models/glue.py",
        "lambda text: json.dumps(text, ensure_ascii=False)[1:-1],",
        "lambda text: text if json.dumps(text, ensure_ascii=False)[1:-1] else text,",
    ),
    Mutant(
        "tests/models/test_families.py::test_control_ids_are_those_of_the_glue",
        "models/codec.py",
        "ids += self.encode_action(text) if owns[slot] else self._world(text)",
        "ids += self._full.encode(text, add_special_tokens=False).ids",
    ),
    Mutant(
        "tests/models/test_families.py::test_what_is_extended_is_the_render_and_nothing_else_is",
        "models/glue.py",
        "if not longer.startswith(seen.rstrip()) or not _squeeze(longer).startswith(_squeeze(turn)):",
        "if not _squeeze(turn):",
    ),
    Mutant(
        "tests/models/test_families.py::test_only_the_newest_thinking_is_kept",
        "models/codec.py",
        "if before:",
        "if False:",
    ),
    Mutant(
        "tests/models/test_families.py::test_end_ids_are_the_union",
        "models/codec.py",
        "self.end_ids = tuple(dict.fromkeys([end, *eos, *map(int, extra_end_ids)]))",
        "self.end_ids = tuple(dict.fromkeys([end, *eos]))",
    ),
    Mutant(
        "tests/models/test_families.py::test_ids_do_not_depend_on_the_day",
        "models/glue.py",
        'self._source = _CLOCK + source if "strftime_now" in source else source',
        "self._source = source",
    ),
    # -- episodes of several rows: nothing sampled is lost or trained twice; the sequence mean counts an episode once
    Mutant(
        "tests/laws/test_rows.py::test_every_sampled_token_is_an_action_once_and_every_row_is_what_the_policy_saw",
        "rl/rollout/worker.py",
        "self._rows.append({name: [] for name in ROW_DTYPES})",
        "self._rows = [{name: [] for name in ROW_DTYPES}]",
    ),
    Mutant(
        "tests/laws/test_rows.py::test_every_sampled_token_is_an_action_once_and_every_row_is_what_the_policy_saw",
        "rl/rollout/worker.py",
        "return self._codec.start(self.messages, self._tools), True",
        "return self._codec.start(before, self._tools), True",
    ),
    Mutant(
        "tests/laws/test_rows.py::test_every_sampled_token_is_an_action_once_and_every_row_is_what_the_policy_saw",
        "rl/rollout/worker.py",
        "session.restart(index + 1)",
        "pass",
    ),
    Mutant(
        "tests/laws/test_rows.py::test_engine_logp_is_learner_logp_in_every_row",
        "rl/rollout/residents.py",
        "self.forget_prompt(session)\n        session._cached = 0",
        "self.forget_prompt(session)",
    ),
    Mutant(
        "tests/laws/test_rows.py::test_engine_logp_is_learner_logp_in_every_row",
        "rl/rollout/engine.py",
        "session.key = fold_in(session._first_key, 2**30 + turn)",
        "pass",
    ),
    Mutant(
        "tests/laws/test_rows.py::test_an_episode_counts_once_however_many_rows_it_has",
        "rl/rollout/batcher.py",
        "actions = sum(int(mask.sum()) for mask in trained)",
        "actions = int(trained[-1].sum()) if trained else 0",
    ),
    Mutant(
        "tests/laws/test_rows.py::test_an_episode_counts_once_however_many_rows_it_has",
        "rl/losses/reduce.py",
        "episodes = jnp.sum(share)\n",
        "episodes = jnp.round(jnp.sum(share))\n",
    ),
    Mutant(
        "tests/laws/test_rows.py::test_an_episode_counts_once_however_many_rows_it_has",
        "rl/losses/recipes.py",
        "return reduce_loss(loss, mask, batch.segment, how=reduce, length=length, share=batch.episode_share), metrics",
        "return reduce_loss(loss, mask, batch.segment, how=reduce, length=length), metrics",
    ),
    # -- answers: the last complete pair counts; world text forges nothing
    Mutant(
        "tests/envs/test_answers.py::test_last_answer",
        "envs/answers.py",
        "last = None if nested else text[start : tag.start()].strip() or None",
        "last = text[start : tag.start()].strip() or None",
    ),
    Mutant(
        "tests/envs/test_answers.py::test_no_tag_survives",
        "envs/answers.py",
        'return _BRACKETED.sub("(", _OPENER.sub(_disarm, text))',
        'return _BRACKETED.sub("(", text)',
    ),
    Mutant(
        "tests/envs/test_answers.py::test_normaliser_keeps_the_answer",
        "envs/answers.py",
        "if w not in _ARTICLES or not _NAMED.search(after))",
        "if w not in _ARTICLES)",
    ),
    # -- worlds: held-out facts stay unseen, faults are addressed, a snapshot is complete, only answers score
    Mutant(
        "tests/envs/test_retrieve.py::test_held_out_passages_are_invisible",
        "envs/search/retrieve.py",
        "self._splits = None if split == SPLITS[-1] else SPLITS[: SPLITS.index(split) + 1]",
        "self._splits = None",
    ),
    Mutant(
        "tests/envs/test_retrieve.py::test_flakiness_is_addressed_by_seed_and_call",
        "envs/search/retrieve.py",
        "fails, which = np.random.default_rng([*self._seed, self.calls]).random(2)",
        "fails, which = np.random.default_rng().random(2)",
    ),
    Mutant(
        "tests/envs/test_search.py::test_malformed_turns_cost_the_turn_and_say_what_was_wrong",
        "envs/search/actions.py",
        "if _FORGED.search(text):",
        "if False:",
    ),
    Mutant(
        "tests/envs/test_search.py::test_world_text_forges_nothing",
        "envs/search/world.py",
        "pages = [escape_tags(page).split() for page in passage.pages]",
        "pages = [page.split() for page in passage.pages]",
    ),
    Mutant(
        "tests/envs/test_search.py::test_gold_lives_with_flaky_tools_and_snapshots_keep_their_place",
        "envs/search/world.py",
        "self._retriever.calls = episode.calls",
        "pass",
    ),
    Mutant(
        "tests/envs/test_search.py::test_tool_faults_are_observations_and_recovery_is_counted",
        "envs/search/world.py",
        "episode.recovered += failed_before and not episode.failed_before",
        "pass",
    ),
    Mutant(
        "tests/laws/test_worlds.py::test_law",
        "envs/search/world.py",
        "return json.dumps(dataclasses.asdict(self._running()), ensure_ascii=False).encode()",
        "return json.dumps(dataclasses.asdict(_Episode(task=self._running().task))).encode()",
    ),
    Mutant(
        "tests/laws/test_worlds.py::test_gold_one_and_everything_else_zero",
        "envs/qa.py",
        "answer = last_answer(head + stop) if self._tagged else action.strip() or None",
        "answer = action.strip() or None",
    ),
    Mutant(
        "tests/envs/test_rename.py::test_no_held_out_name_is_shown_under_invented_names",
        "envs/search/rename.py",
        "return new in names.real or not names.held_out.isdisjoint(new)",
        "return new in names.real",
    ),
    Mutant(
        "tests/envs/test_rename.py::test_inventions_are_one_for_one_and_never_a_real_name",
        "envs/search/rename.py",
        "taken.add(new)",
        "pass",
    ),
    Mutant(
        "tests/envs/test_rename.py::test_queries_are_translated_back",
        "envs/search/world.py",
        "self._retriever.search(self._real(query), self._k",
        "self._retriever.search(query, self._k",
    ),
    # -- models of somebody else's: nothing is guessed, left over, or read by who does not need it
    Mutant(
        "tests/models/test_tokenizer.py::test_ids_are_those_of_tokenizer_json_whatever_class_is_named",
        "models/tokenizer.py",
        "from transformers import PreTrainedTokenizerFast\n\n    try:",
        "from transformers import AutoTokenizer as PreTrainedTokenizerFast\n\n    try:",
    ),
    Mutant(
        "tests/models/test_hf.py::test_born_sharded_is_the_same_and_reads_parts_only",
        "models/layout.py",
        "if str(index) not in done:",
        "if True:",
    ),
    Mutant(
        "tests/models/test_hf.py::test_layout_is_theirs",
        "models/layout.py",
        "ours = ours.reshape(-1, ours.shape[-1]).T",
        "ours = ours.transpose(2, 1, 0).reshape(ours.shape[-1], -1)",
    ),
    Mutant(
        "tests/models/test_hf.py::test_missing_and_left_over_tensors_are_named",
        "models/hf.py",
        "if left:",
        "if False:",
    ),
    Mutant(
        "tests/models/test_hf.py::test_a_tied_head_may_be_kept_twice_but_must_be_the_table",
        "models/hf.py",
        "if not same or any(",
        "if not same and any(",
    ),
    Mutant(
        "tests/models/test_hf.py::test_sliding_windows_layer_by_layer",
        "models/hf_config.py",
        "types = [_LAYER_TYPES[i >= full] for i in range(n)]",
        "types = [_LAYER_TYPES[i < full] for i in range(n)]",
    ),
    Mutant(
        "tests/models/test_gguf.py::test_a_file_reads_to_what_it_was_made_from",
        "models/gguf.py",
        "if self.pairs:  # a slice of rows holds whole heads",
        "if False:",
    ),
    Mutant(
        "tests/models/test_gguf.py::test_a_cut_file_is_an_error_wherever_it_is_cut",
        "models/gguf.py",
        "if at + rows * row > len(cursor.data):",
        "if False:",
    ),
    Mutant(
        "tests/models/test_gguf.py::test_ids_are_the_file_s_own",
        "models/gguf_tokenizer.py",
        "if types[i] in (_CONTROL, _USER_DEFINED)]",
        "if types[i] == _USER_DEFINED]",
    ),
    Mutant(
        "tests/launch/test_policy.py::test_shape_weights_tokenizer_and_ends_are_theirs",
        "launch/policy.py",
        "return with_adapters(plan, model, load_weights(plan), key)",
        "return key",
    ),
    Mutant(
        "tests/launch/test_policy.py::test_shape_weights_tokenizer_and_ends_are_theirs",
        "launch/policy.py",
        "codec = Codec(tokenizer, ends)",
        "codec = Codec(tokenizer)",
    ),
    Mutant(
        "tests/launch/test_policy.py::test_what_contradicts_the_model_is_refused",
        "launch/policy.py",
        "if name not in COMPUTE and getattr(theirs, name) != value:",
        "if False:",
    ),
    Mutant(
        "tests/launch/test_policy.py::test_a_tokenizer_that_transformers_would_read_otherwise_is_not_exported",
        "launch/export.py",
        "check_tokenizer(tokenizer, model)\n",
        "hf.family(model)\n",
    ),
    Mutant(
        "tests/launch/test_policy.py::test_what_reads_back_differently_is_not_exported",
        "launch/export.py",
        'if differ:\n        raise RuntimeError(f"{folder.name}: {differ[:5]}',
        'if False:\n        raise RuntimeError(f"{folder.name}: {differ[:5]}',
    ),
    Mutant(
        "tests/launch/test_policy.py::test_a_run_needs_only_its_folder_and_exports_what_it_trained",
        "launch/export.py",
        "params = lora.merge(params)",
        "params = lora.base(params)",
    ),
    Mutant(
        "tests/models/test_hf.py::test_what_would_change_the_computation_is_refused",
        "models/hf_config.py",
        '"is_causal": True,',
        '"is_causal": False,',
    ),
    Mutant(
        "tests/models/test_hf.py::test_what_would_change_the_computation_is_refused",
        "models/hf_config.py",
        '    if unknown:\n        raise ValueError(\n            f"got {unknown[0]}',
        '    if False:\n        raise ValueError(\n            f"got {unknown[0]}',
    ),
    Mutant(
        "tests/models/test_hf.py::test_the_original_length_at_the_top_goes_first",
        "models/hf_config.py",
        "if name in config:",
        "if False:",
    ),
    Mutant(
        "tests/models/test_hf.py::test_born_sharded_is_the_same_and_reads_parts_only",
        "models/layout.py",
        "block = stored[embed, _rows(heads, place.shape[1])]",
        "block = stored[:, :][embed, _rows(heads, place.shape[1])]",
    ),
    Mutant(
        "tests/models/test_gguf.py::test_born_sharded_is_the_same_and_reads_parts_only",
        "models/gguf.py",
        "first, last = begin // self.per_block, -(-end // self.per_block)",
        "begin, first, last = begin, 0, self.shape[-1] // self.per_block",
    ),
    Mutant(
        "tests/models/test_gguf.py::test_what_is_odd_is_named",
        "models/gguf.py",
        'if rest.pop("attention.causal", True) is not True:',
        'if rest.pop("attention.causal", True) is None:',
    ),
    Mutant(
        "tests/launch/test_policy.py::test_what_started_from_it_goes_on_without_the_model_s_folder",
        "launch/policy.py",
        "if kept is not None and kept.exists():",
        "if False:",
    ),
    Mutant(
        "tests/launch/test_policy.py::test_of_a_tokenizer_s_folder_the_weights_and_the_shape_stay_there",
        "models/pretrained.py",
        'tuple(name for name in DESCRIPTION if name != "config.json")',
        "DESCRIPTION",
    ),
    # -- a tag of several tokens
    Mutant(
        "tests/rl/test_stops.py::test_the_vocabulary_is_looked_through_once_for_all_callers",
        "rl/rollout/stops.py",
        "with self._looking:",
        "if True:",
    ),
    Mutant(
        "tests/rl/test_stops.py::test_each_text_is_made_once_and_few_strings_are_remembered",
        "rl/rollout/stops.py",
        "self._found.popitem(last=False)",
        "pass",
    ),
    Mutant(
        "tests/laws/test_tokens.py::test_a_tag_of_several_tokens_ends_a_turn_and_its_crossing_token_is_trained",
        "rl/rollout/worker.py",
        "return (text[: min(ends)], True) if ends else (text, False)",
        "return (text, True) if ends else (text, False)",
    ),
    # -- layers
    Mutant(
        "tests/test_layers.py::test_importing_all_of_envs_leaves_jax_alone",
        "envs/base.py",
        "import dataclasses",
        "import dataclasses, jax",
    ),
    Mutant(
        "tests/test_layers.py::test_every_import_points_downward",
        "envs/base.py",
        "import dataclasses",
        "import dataclasses, jax",
    ),
    # -- the decoder: exactly what transformers computes; every kernel keeps segments and windows; memory as promised
    Mutant(
        "tests/models/test_golden.py::test_logits_equal_transformers",
        "models/rope.py",
        "inv_freq = np.float32(1) / stretch",
        "inv_freq = (theta ** -exponent.astype(np.float64)).astype(np.float32)",
    ),
    Mutant(
        "tests/models/test_golden.py::test_logits_equal_transformers",
        "models/rope.py",
        "return factor * jnp.cos(angle), factor * jnp.sin(angle)",
        "return jnp.cos(angle), jnp.sin(angle)",
    ),
    Mutant(
        "tests/models/test_golden.py::test_logits_equal_transformers",
        "models/rope.py",
        "long, short = wavelength > length / low, wavelength < length / high",
        "long, short = wavelength > length / high, wavelength < length / high",
    ),
    Mutant(
        "tests/models/test_golden.py::test_logits_equal_transformers",
        "models/rope.py",
        "begin, end = math.floor(begin), math.ceil(end)",
        "begin, end = math.ceil(begin), math.floor(end)",
    ),
    Mutant(
        "tests/laws/test_learner.py::test_a_kernel_is_divided_over_the_learner_s_mesh",
        "models/attention.py",
        "if sharding is not None and sharding.mesh.size > 1:",
        "if False:",
    ),
    Mutant(
        "tests/laws/test_attention.py::test_three_segments_a_row_equal_three_rows",
        "models/attention.py",
        "mixed = jax.vmap(kernel)(q, k, v, splash.SegmentIds(segment, segment))",
        "mixed = jax.vmap(kernel)(q, k, v, splash.SegmentIds(0 * segment, 0 * segment))",
    ),
    Mutant(
        "tests/laws/test_attention.py::test_three_segments_a_row_equal_three_rows",
        "models/attention.py",
        "seen = segment[:, None, :, None] == segment[:, None, None, :]",
        "seen = segment[:, None, :, None] >= segment[:, None, None, :]",
    ),
    Mutant(
        "tests/laws/test_attention.py::test_three_segments_a_row_equal_three_rows",
        "models/attention.py",
        "mask = splash.LocalMask(shape, window_size=(window - 1, 0), offset=0)",
        "mask = splash.LocalMask(shape, window_size=(window, 0), offset=0)",
    ),
    Mutant(
        "tests/laws/test_attention.py::test_three_segments_a_row_equal_three_rows",
        "models/attention.py",
        "seen = seen & (jnp.arange(begin, end)[:, None] - jnp.arange(end)[None, :] < window)",
        "seen = seen & (jnp.arange(begin, end)[:, None] - jnp.arange(end)[None, :] <= window)",
    ),
    Mutant(
        "tests/laws/test_attention.py::test_three_segments_a_row_equal_three_rows",
        "models/attention.py",
        "seen = seen & (token[:, None] - token[None, :] < window)",
        "seen = seen & (token[:, None] - token[None, :] <= window)",
    ),
    Mutant(
        "tests/models/test_golden.py::test_the_cached_path_computes_the_same_logits",
        "models/transformer.py",
        "near = seen if window is None else [s & (far < window) for s, far in zip(seen, back, strict=True)]",
        "near = seen",
    ),
    Mutant(
        "tests/models/test_generate.py::test_sampled_logp_equals_the_learners_at_each_temperature",
        "models/generate.py",
        "recent = Past(*columns, fed, (position - state.step)[:, None] + jnp.arange(n))",
        "recent = Past(*columns, fed, position[:, None] + jnp.arange(n))",
    ),
    Mutant(
        "tests/models/test_memory.py::test_chunked_log_probabilities_never_hold_all_logits",
        "models/logprobs.py",
        "again = jax.checkpoint(score)",
        "again = score",
    ),
    Mutant(
        "tests/models/test_memory.py::test_remat_policies_are_ordered_by_memory",
        "models/transformer.py",
        'policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if config.remat == "dots" else None',
        "policy = None",
    ),
    # -- what an attack found: nothing is in two splits, nothing unkeepable reaches the loop, no run trains nothing
    Mutant(
        "tests/envs/test_qa.py::test_a_question_is_in_one_split_alone",
        "envs/qa.py",
        'asked = "\\0".join(message.content for message in task.prompt)',
        "asked = task.task_id",
    ),
    Mutant(
        "tests/rl/test_worker.py::test_facts_that_cannot_be_kept_are_an_env_error",
        "rl/rollout/worker.py",
        "trajectory.to_bytes()",
        "pass",
    ),
    Mutant(
        "tests/rl/test_worker.py::test_what_ends_a_program_ends_the_episode",
        "rl/rollout/watched.py",
        "except BaseException as error:",
        "except Exception as error:",
    ),
    Mutant(
        "tests/models/test_codec.py::test_half_a_surrogate_pair_is_a_question_mark",
        "models/codec.py",
        'text = text.encode("utf-8", "replace").decode()',
        "text = text",
    ),
    Mutant(
        "tests/rl/test_learner.py::test_a_run_in_which_no_update_can_be_made_ends",
        "rl/learner.py",
        "if skipped >= MOST_SKIPPED:",
        "if False:",
    ),
    Mutant(
        "tests/rl/test_curriculum.py::test_fingerprint_sees_a_changed_a_cut_and_a_reordered_set",
        "rl/curriculum.py",
        "task.seed, prompt, task.data]",
        "task.seed, prompt]",
    ),
    Mutant(
        "tests/launch/test_build.py::test_what_is_wrong_is_named",
        "launch/build.py",
        "check_facts(choose_tasks(world, trained, 1, plan.seed)[0], world, build_terms(plan))",
        "build_terms(plan)",
    ),
    # -- rewards: a term stays within its reach, the outcome leads, a vote reads no gold, what is not judged is not 0
    Mutant(
        "tests/laws/test_rewards.py::test_shaping_that_passes_never_turns_an_outcome_round",
        "rl/rewards/compose.py",
        "lead = leader.weight * (leader.reach if leader.margin is None else leader.margin)",
        "lead = leader.weight * leader.reach",
    ),
    Mutant(
        "tests/rl/test_reward_terms.py::test_soft_overlong_has_a_floor",
        "rl/rewards/shaping.py",
        "return max(-1.0, min(0.0, (max_tokens - cache_tokens - n) / cache_tokens))",
        "return min(0.0, (max_tokens - cache_tokens - n) / cache_tokens)",
    ),
    Mutant(
        "tests/laws/test_rewards.py::test_no_term_goes_beyond_its_reach",
        "rl/rewards/truthful.py",
        "reach=1.0 - wrong,",
        "reach=1.0,",
    ),
    Mutant(
        "tests/rl/test_reward_terms.py::test_kimi_length",
        "rl/rewards/shaping.py",
        "return [score if right else min(0.0, score) for score, right in zip(scores, correct, strict=True)]",
        "return scores",
    ),
    Mutant(
        "tests/laws/test_rewards.py::test_filtering_the_overlong_leaves_the_others_what_they_had",
        "rl/rewards/shaping.py",
        "return [t for t in trajectories if t.status not in LIMITS]",
        "return list(trajectories)",
    ),
    Mutant(
        "tests/laws/test_rewards.py::test_the_loop_trains_on_what_no_limit_cut_and_compares_with_all",
        "rl/loop.py",
        "without_overlong(episodes) if filter_overlong else episodes,",
        "episodes,",
    ),
    Mutant(
        "tests/laws/test_rewards.py::test_a_vote_reads_no_gold",
        "rl/rewards/majority.py",
        'answer = read_fact(trajectory, "answer") if trajectory.status is Status.DONE else None',
        'answer = trajectory.facts.get("gold") if trajectory.status is Status.DONE else None',
    ),
    Mutant(
        "tests/laws/test_ttrl.py::test_the_batch_knows_no_label",
        "launch/runs.py",
        '"terms": terms,',
        '"terms": build.make_terms({"success": 1.0}, {}),',
    ),
    Mutant(
        "tests/launch/test_ttrl.py::test_what_knows_an_answer_is_refused",
        "launch/ttrl.py",
        "told = sorted({*term.reads} - LABEL_FREE)",
        "told = []",
    ),
    Mutant(
        "tests/launch/test_ttrl.py::test_a_set_and_then_single_queries_from_the_same_start",
        "launch/ttrl.py",
        "reinforce.publish(parts, live, start, _version(plan, i))",
        "reinforce.publish(parts, live, start, _version(plan, i)) if not i else None",
    ),
    Mutant(
        "tests/rl/test_reward_terms.py::test_a_wrong_label_can_give_right_rewards",
        "rl/metrics/majority.py",
        "most = min((len(a) for a, _ in played), default=0)",
        "most = max((len(a) for a, _ in played), default=0)",
    ),
    Mutant(
        "tests/rl/test_reward_terms.py::test_vote",
        "rl/rewards/majority.py",
        "if not first_two or (len(first_two) == 2 and first_two[0][1] == first_two[1][1]):",
        "if not first_two:",
    ),
    Mutant(
        "tests/rl/test_reward_terms.py::test_vote",
        "rl/rewards/majority.py",
        "first_two = Counter(answer for answer in answers if answer is not None).most_common(2)",
        "first_two = Counter(answers).most_common(2)",
    ),
    Mutant(
        "tests/rl/test_reward_terms.py::test_the_table_of_search_r1",
        "rl/rewards/format.py",
        "return final if answered else 0.0",
        "return final",
    ),
    Mutant(
        "tests/rl/test_reward_terms.py::test_milestones_are_paid_once_in_the_turn_that_reached_them",
        "rl/rewards/milestones.py",
        "turns = Counter(turn for turn in reported.values() if turn is not None)",
        "turns = Counter(turn or 0 for turn in reported.values())",
    ),
    Mutant(
        "tests/envs/test_search.py::test_a_milestone_keeps_its_first_turn",
        "envs/search/world.py",
        "if reached and episode.milestones[name] is None:",
        "if reached:",
    ),
    Mutant(
        "tests/rl/test_judge.py::test_over_the_budget_is_not_judged",
        "rl/rewards/judge.py",
        'if self._counts["calls"] >= self._endpoint.max_calls:',
        "if False:",
    ),
    Mutant(
        "tests/rl/test_judge.py::test_scores_are_asked_once_and_kept",
        "rl/rewards/judge.py",
        "if (kept := _kept(file)) is not None:",
        "if False:",
    ),
    Mutant(
        "tests/rl/test_judge.py::test_what_an_episode_says_cannot_leave_its_bracket",
        "rl/rewards/judge.py",
        "shown = escape_tags(text[-self._endpoint.max_chars :])",
        "shown = text[-self._endpoint.max_chars :]",
    ),
    Mutant(
        "tests/rl/test_rewards.py::test_each_term_is_logged_raw_and_weighted",
        "rl/metrics/episodes.py",
        "Mean(total / term.weight, len(known)) if term.weight",
        "Mean(total, len(known)) if term.weight",
    ),
    Mutant(
        "tests/launch/test_rescore.py::test_scores_and_advantages_of_stored_episodes",
        "launch/rescore.py",
        "np.zeros(len(group), int), judged, scale=scale)",
        "np.zeros(len(group), int), np.ones(len(group), bool), scale=scale)",
    ),
    # -- tool calls: what is not exactly a call is never run
    Mutant(
        "tests/envs/test_tool_calls.py::test_a_bad_call_is_a_message_and_stays_in_the_text",
        "envs/tool_calls.py",
        'raise _Wrong(f"{name} is not JSON")',
        "return float(name)",
    ),
    Mutant(
        "tests/envs/test_tool_calls.py::test_a_bad_call_is_a_message_and_stays_in_the_text",
        "envs/tool_calls.py",
        "if len(found) < len(pairs):",
        "if False:",
    ),
    Mutant(
        "tests/envs/test_tool_calls.py::test_a_call_cut_by_length_is_neither_a_call_nor_a_bad_one",
        "envs/tool_calls.py",
        "if closed < 0 and cut:",
        "if False:",
    ),
    Mutant(
        "tests/envs/test_tool_calls.py::test_depth_without_end",
        "envs/tool_calls.py",
        'raise _Wrong(f"it is nested deeper than {MAX_DEPTH}")',
        "pass",
    ),
    Mutant(
        "tests/envs/test_tool_calls.py::test_what_is_settled_is_the_beginning_whatever_follows",
        "envs/tool_calls.py",
        "return text[: min(ends, default=len(text))].rstrip()",
        "return text.rstrip()",
    ),
    Mutant(
        "tests/envs/test_search.py::test_malformed_calls_cost_the_turn_and_say_what_was_wrong",
        "envs/search/actions.py",
        "calls = tool_calls.parse(text, TOOLS).calls",
        "calls = [c for c in tool_calls.parse(text).calls if c.arguments]",
    ),
    Mutant(
        "tests/models/test_families.py::test_tools_forge_no_control_token",
        "models/codec.py",
        "forged = sorted(name for name in self._control_texts.values() if name in text)",
        "forged = []",
    ),
    Mutant(
        "tests/models/test_families.py::test_tools_that_a_later_message_moves_are_told",
        "models/codec.py",
        'outline("assistant", said)[0], roles, self._tools_text(tools))',
        'outline("assistant", said)[0], roles, "")',
    ),
    # -- serving: an agent's conversation is recorded as the engine consumed and sampled it, each token an action once
    Mutant(
        "tests/laws/test_serve.py::test_a_conversation_is_recorded_token_by_token",
        "launch/conversations.py",
        "record.sampled(turn, conversation.turns)",
        "record.given(turn.ids, conversation.turns)",
    ),
    Mutant(
        "tests/laws/test_serve.py::test_a_conversation_is_recorded_token_by_token",
        "launch/conversations.py",
        "if place is not None and chat.n == 1 and self._goes_on(place, chat):",
        "if False:",
    ),
    Mutant(
        "tests/laws/test_serve.py::test_what_was_sampled_is_an_action_once_wherever_conversations_part",
        "launch/conversations.py",
        "if place is not None and chat.n == 1 and self._goes_on(place, chat):",
        "if place is not None and chat.n == 1:",
    ),
    Mutant(
        "tests/laws/test_serve.py::test_what_was_sampled_is_an_action_once_wherever_conversations_part",
        "launch/conversations.py",
        "new = [*place.tokens[: place.length], *new]",
        "new = [*place.tokens, *new]",
    ),
    Mutant(
        "tests/laws/test_serve.py::test_what_was_sampled_is_an_action_once_wherever_conversations_part",
        "launch/conversations.py",
        "alike = (own.session.sampling, own.seed) == (chat.sampling, chat.seed)",
        "alike = True",
    ),
    Mutant(
        "tests/laws/test_serve.py::test_a_template_that_rewrites_turns_begins_rows",
        "launch/conversations.py",
        "session.restart(conversation.turns)",
        "pass",
    ),
    Mutant(
        "tests/launch/test_serve.py::test_a_waiting_caller_that_leaves_waits_no_more",
        "launch/conversations.py",
        "asked.left = True",
        "asked.left = False",
    ),
    Mutant(
        "tests/launch/test_serve.py::test_more_than_may_wait_are_told_so_and_the_others_are_served",
        "launch/conversations.py",
        'raise Full(f"{len(self._queue)} requests wait already")',
        "pass",
    ),
    Mutant(
        "tests/launch/test_serve.py::test_a_caller_that_leaves_cancels_and_may_ask_again[True]",
        "launch/front.py",
        "self._ended()",
        "pass",
    ),
    Mutant(
        "tests/launch/test_serve_faults.py::test_a_full_disk_is_told_and_loses_no_conversation[append]",
        "launch/front.py",
        "except Exception:  # a full disk, say: the server goes on, and what was to be kept is still there",
        "except TimeoutError:",
    ),
    Mutant(
        "tests/launch/test_serve_faults.py::test_a_full_disk_is_told_and_loses_no_conversation[close]",
        "launch/conversations.py",
        "ended = list(self._ended)",
        "ended, self._ended = self._ended, []",
    ),
    Mutant(
        "tests/launch/test_serve_faults.py::test_an_engine_without_a_place_is_429",
        "launch/conversations.py",
        "raise Busy(str(err)) from err",
        "raise",
    ),
    # -- constraints reach requests and evaluation: what is sampled is a call, or JSON of the schema
    Mutant(
        "tests/laws/test_constrain_tools.py::test_an_untrained_policy_calls_tools_in_every_turn_or_in_none",
        "launch/build.py",
        "(build_pool(plan, engine, place, codec, constraint)) as own",
        "(build_pool(plan, engine, place, codec)) as own",
    ),
    Mutant(
        "tests/launch/test_serve_constraints.py::test_an_answer_in_a_schema",
        "launch/conversations.py",
        "turn = session.generate(new, **limits, constraint=asked.constraint)",
        "turn = session.generate(new, **limits)",
    ),
    Mutant(
        "tests/envs/test_grammar.py::test_a_string_of_a_call_holds_no_mark",
        "envs/grammar.py",
        "rest = _avoiding(how.marks, _FORBIDDEN) if how.marks else",
        "rest =",
    ),
    Mutant(
        "tests/envs/test_grammar.py::test_of_a_schema",
        "envs/grammar.py",
        "begun = [text + after, *([] if needed else begun)]",
        "begun = [text + after, *begun]",
    ),
    # -- health: an alarm compares what is apart, and a resumed run remembers
    Mutant(
        "tests/rl/test_alarms.py::test_a_comparison_waits_until_its_two_windows_are_apart",
        "rl/metrics/alarms.py",
        "if len(known) < 2 * window:",
        "if len(known) < window:",
    ),
    Mutant(
        "tests/rl/test_alarms.py::test_it_rings_for_the_ill_run_and_not_for_the_healthy_one",
        "rl/metrics/alarms.py",
        "if success_now is not None and success_now > success_first:",
        "if success_now is not None:",
    ),
    Mutant(
        "tests/rl/test_alarms.py::test_records_and_console_say_what_rings_and_a_resumed_run_remembers",
        "rl/monitor.py",
        "self._limits, self._history = limits, _history(path) if limits else []",
        "self._limits, self._history = limits, []",
    ),
    Mutant(
        "tests/envs/test_search.py::test_an_answer_that_nothing_showed_is_unsupported_even_when_it_is_right",
        "envs/search/world.py",
        "return float(not any(contains(text, [episode.answer]) for text in shown))",
        "return float(not episode.exact_match)",
    ),
    # -- reward models: frozen, of stored ids, measured on tasks that they never saw
    Mutant(
        "tests/laws/test_roll_in.py::test_a_roll_in_has_exactly_the_stored_ids_and_then_goes_on",
        "rl/rollout/roll_in.py",
        "self._ids += said.turn.ids",
        "self._ids += said.turn.ids[:-1]",
    ),
    Mutant(
        "tests/laws/test_roll_in.py::test_a_roll_in_has_exactly_the_stored_ids_and_then_goes_on",
        "rl/rollout/roll_in.py",
        "self._ids, self._began = [], turn",
        "self._began = turn",
    ),
    Mutant(
        "tests/laws/test_roll_in.py::test_another_answer_of_the_world_is_no_label",
        "rl/rollout/roll_in.py",
        "if list(new_ids) != said.given:",
        "if False:",
    ),
    Mutant(
        "tests/laws/test_roll_in.py::test_a_soft_label_is_the_share_of_what_was_scored",
        "rl/rollout/roll_in.py",
        "scored = [success(t) for t in trajectories if t.status.scored]",
        "scored = [success(t) for t in trajectories]",
    ),
    Mutant(
        "tests/laws/test_reward_model.py::test_it_learns_what_it_is_scored_by_and_a_frozen_one_stays",
        "rl/reward_model.py",
        "frozen = jax.tree.map(jnp.copy, params)",
        "frozen = params",
    ),
    Mutant(
        "tests/laws/test_reward_model.py::test_a_score_does_not_depend_on_what_it_is_scored_with",
        "rl/reward_model.py",
        "out[j] = p[line, asked[j][1]].astype(np.float64)",
        "out[j] = p[0, asked[j][1]].astype(np.float64)",
    ),
    Mutant(
        "tests/laws/test_reward_model.py::test_it_learns_what_it_is_scored_by_and_a_frozen_one_stays",
        "rl/reward_model.py",
        "segment[row, at] = segment[row].max() + 1",
        "segment[row, at] = 1",
    ),
    Mutant(
        "tests/rl/test_reward_model.py::test_no_task_is_on_both_sides",
        "rl/reward_model.py",
        'address = hashlib.sha256(f"{seed}/{e.task}".encode()).digest()',
        'address = hashlib.sha256(f"{seed}/{id(e)}".encode()).digest()',
    ),
    Mutant(
        "tests/rl/test_reward_model.py::test_what_is_written_down_is_ids_where_is_judged_and_labels",
        "rl/reward_model.py",
        'lines.write(json.dumps({"task": e.task} | {name: x.tolist() for name, x in arrays.items()}) + "\\n")',
        'lines.write(json.dumps({"task": e.task, "n": 1} | {name: x.tolist() for name, x in arrays.items()}) + "\\n")',
    ),
    Mutant(
        "tests/rl/test_reward_model.py::test_a_failed_world_and_what_nobody_knows_are_no_data",
        "rl/reward_model.py",
        "if not trajectory.status.scored or not trajectory.rows:",
        "if not trajectory.rows:",
    ),
    Mutant(
        "tests/rl/test_reward_model.py::test_the_loss_is_the_mean_over_what_is_judged_and_nothing_else_reaches_it",
        "rl/losses/reward_model.py",
        "log_odds, labels = masked.keep(scored.log_odds, mask), masked.keep(batch.rewards, mask)",
        "log_odds, labels = scored.log_odds, batch.rewards",
    ),
    Mutant(
        "tests/rl/test_reward_model.py::test_measures_of_four",
        "rl/metrics/reward_model.py",
        "return float(np.sum(won * (below + lost / 2)) / (yes * no))",
        "return float(np.sum(won * below) / (yes * no))",
    ),
    Mutant(
        "tests/rl/test_reward_model.py::test_turns_add_up_to_the_score_of_the_episode",
        "rl/rewards/process.py",
        "now = min(before, now)",
        "pass",
    ),
    Mutant(
        "tests/launch/test_train_rm.py::test_what_cannot_be_learnt_from_is_refused",
        "launch/train_rm.py",
        "if strays := sorted(wanted - found.keys()):",
        "if strays := []:",
    ),
    Mutant(
        "tests/launch/test_train_rm.py::test_a_reward_model_that_is_none_is_refused",
        "launch/reward_models.py",
        "if theirs.exists() and own.read_bytes() != theirs.read_bytes():",
        "if False:",
    ),
    # -- forks: what is measured is in no demonstration
    Mutant(
        "tests/launch/test_build.py::test_demonstrations_without_forks_have_none",
        "launch/build.py",
        "if any(facts[name] for name in without):",
        "if False:",
    ),
    Mutant(
        "tests/launch/test_build.py::test_hinted_demonstrations_have_the_hint_where_there_is_one",
        "launch/build.py",
        "if hinted and (hint := world.hint(task)):",
        "if False:",
    ),
    # -- lessons: judged by their text, and demonstrations are of them
    Mutant(
        "tests/envs/test_code_lessons.py::test_a_lesson_is_judged_by_its_text",
        "envs/code/lessons.py",
        'return changed == task.data["files"]',
        'return set(task.data["files"]) == set(changed)',
    ),
    Mutant(
        "tests/envs/test_code_instances.py::test_gold_makes_the_files_that_the_gold_patch_adds",
        "envs/code/scripted.py",
        "for path in sorted(repository.absent)]",
        "for path in ()]",
    ),
    Mutant(
        "tests/envs/test_code_instances.py::test_trees_of_one_commit_are_told_apart_by_their_patches",
        "envs/code/repositories.py",
        "-{patched[:8]}",
        "",
    ),
    Mutant(
        "tests/envs/test_code_instances.py::test_instances_are_measured_where_tasks_are_made_not_in_an_episode",
        "envs/code/world.py",
        "list(pool.map(repositories.data, kept))",
        "pass",
    ),
    Mutant(
        "tests/envs/test_code_tasks.py::test_functions_in_functions_are_of_the_split_of_the_outer_one",
        "envs/code/operators.py",
        'outer = outer or (function if inside else "")',
        'outer = function if inside else ""',
    ),
    Mutant(
        "tests/envs/test_code_syntax.py::test_threads_may_parse_at_once",
        "envs/code/syntax.py",
        "with _LOCK:\n        return ast.parse(source)",
        "if True:\n        return ast.parse(source)",
    ),
    Mutant(
        "tests/envs/test_code_lessons.py::test_a_lesson_comes_again_under_other_names",
        "envs/code/lessons.py",
        "right, wrong, name = _renamed(right, new), _renamed(wrong, new), new.get(name, name)",
        "right, wrong, name = _renamed(right, new), wrong, new.get(name, name)",
    ),
    Mutant(
        "tests/envs/test_code_lessons.py::test_an_earlier_function_of_the_same_name_is_no_place_for_a_bug",
        "envs/code/lessons.py",
        "if not begin <= site.start < site.end <= end:",
        "if not site.start < site.end <= end:",
    ),
    Mutant(
        "tests/laws/test_code_grading.py::test_a_change_that_is_being_graded_is_waited_for",
        "envs/code/grade.py",
        "if running is not None:\n            return running.result()",
        "if running is not None:\n            return make()",
    ),
    Mutant(
        "tests/envs/test_code_lessons.py::test_the_tokenizer_is_trained_on_what_is_demonstrated",
        "envs/code/world.py",
        '_texts(taught() if lessons else tasks("train"), demonstrate)',
        '_texts([*tasks("train"), *(taught() if lessons else ())], demonstrate)',
    ),
    Mutant(
        "tests/envs/test_code_lessons.py::test_a_wrong_edit_is_of_a_line_that_can_be_turned_where_there_is_one",
        "envs/code/scripted.py",
        "likely = [line for line in others if _turned(line)] or others",
        "likely = others",
    ),
    Mutant(
        "tests/envs/test_code_lessons.py::test_a_slip_is_refused_and_then_the_edit_is_done_as_it_was_meant",
        "envs/code/scripted.py",
        'return fewer.lstrip("/"), search, replace',
        "return fewer, search, replace",
    ),
    Mutant(
        "tests/envs/test_code_lessons.py::test_what_is_left_of_a_line_without_a_word_may_stand_in_the_file",
        "envs/code/scripted.py",
        'if kind == "same" or fewer in text else',
        'if kind == "same" else',
    ),
    Mutant(
        "tests/envs/test_code_lessons.py::test_a_world_of_one_turn_has_no_slips_and_bad_shares_are_refused",
        "envs/code/world.py",
        'demonstrations = {"slips": 0.0, **demonstrations}',
        "demonstrations = {**demonstrations}",
    ),
    Mutant(
        "tests/envs/test_code_lessons.py::test_a_wrong_demonstration_edits_what_the_prompt_shows",
        "envs/code/scripted.py",
        'shown = [function_text(repository, name)[1] for name in task.data["functions"]] or [text]',
        "shown = [text]",
    ),
    Mutant(
        "tests/envs/test_search.py::test_a_misleading_title_stands_over_another_page_and_asking_again_recovers",
        "envs/search/retrieve.py",
        "self.misled = len(set(titles)) > 1",
        "self.misled = True",
    ),
    Mutant(
        "tests/envs/test_search.py::test_every_fact_at_every_step",
        "envs/search/world.py",
        '"success_after_fork": float(episode.exact_match) if forks else float("nan"),',
        '"success_after_fork": float(episode.exact_match),',
    ),
    # -- sweeps: each step begins from the one before it
    Mutant(
        "tests/launch/test_sweep.py::test_each_arm_runs_once_from_the_warm_start_of_its_seed",
        "launch/sweep.py",
        "[config, stages, measure]",
        "[arm, config, stages, measure]",
    ),
    Mutant(
        "tests/launch/test_sweep.py::test_the_steps_of_an_arm_begin_each_from_the_one_before",
        "launch/sweep.py",
        "for step, stage, folder, before in zip(steps, stages, folders, [warm, *folders], strict=False):",
        "for step, stage, folder, before in zip(steps, stages, folders, [warm] * 9, strict=False):",
    ),
    Mutant(
        "tests/launch/test_rft.py::test_demonstrations_go_on_from_another_run",
        "launch/sft.py",
        'elif init is not None or runs.saved(workdir / "init", hosts):',
        "elif False:",
    ),
    # -- observations that are trained: those tokens alone, by the policy of the batch
    Mutant(
        "tests/laws/test_world_tokens.py::test_on_adds_the_gradient_of_the_observations_alone",
        "rl/rollout/batcher.py",
        "return (row.turn >= 0) & ~row.action_mask",
        "return ~row.action_mask",
    ),
    Mutant(
        "tests/laws/test_world_tokens.py::test_on_adds_the_gradient_of_the_observations_alone",
        "rl/learner.py",
        'behavior_logp = jnp.where(batch.world_mask, own["logp"], batch.behavior_logp)',
        "behavior_logp = batch.behavior_logp",
    ),
    Mutant(
        "tests/laws/test_world_tokens.py::test_off_nothing_knows_of_it",
        "rl/rollout/batcher.py",
        "actions = sum(int(mask.sum()) for mask in trained)",
        "actions = sum(int(row.action_mask.sum()) for row in rows)",
    ),
    # -- failed worlds: budgets by kind, every attempt counted, what always fails is not played again
    Mutant(
        "tests/laws/test_failures.py::test_each_kind_has_a_budget_of_its_own",
        "rl/rollout/failures.py",
        "own = sum(failure.kind == last.kind for failure in failures)",
        "own = len(failures)",
    ),
    Mutant(
        "tests/laws/test_failures.py::test_each_kind_has_a_budget_of_its_own",
        "rl/rollout/failures.py",
        "return last.kind == DATA and last in before",
        "return False",
    ),
    Mutant(
        "tests/laws/test_failures.py::test_what_proves_that_a_task_always_fails",
        "rl/rollout/failures.py",
        "if not all(_is_repeated(t.facts) for t in own):",
        "if False:",
    ),
    Mutant(
        "tests/laws/test_failures.py::test_a_failure_is_told_by_its_type_and_known_again",
        "envs/failures.py",
        "and not isinstance(each, _NAMED)",
        "",
    ),
    Mutant(
        "tests/laws/test_failures.py::test_every_member_and_every_attempt_is_counted",
        "rl/rollout/table.py",
        "if group.ended[member] is not None or job.attempt != len(group.failures[member]):",
        "if group.ended[member] is not None:",
    ),
    Mutant(
        "tests/laws/test_failures.py::test_every_member_and_every_attempt_is_counted",
        "rl/rollout/table.py",
        'self.counts["retries"] += 1',
        "pass",
    ),
    Mutant(
        "tests/laws/test_failures.py::test_every_member_and_every_attempt_is_counted",
        "rl/rollout/table.py",
        "for member in [m for m, t in group.ended.items() if t is None]:",
        "for member in [m for m, t in group.ended.items() if t is None][:1]:",
    ),
    Mutant(
        "tests/laws/test_failures.py::test_what_a_given_up_attempt_says_late_is_discarded",
        "rl/rollout/table.py",
        'self.counts["late_attempts"] += 1',
        "pass",
    ),
    Mutant(
        "tests/laws/test_failures.py::test_a_further_attempt_has_a_fresh_world",
        "rl/rollout/pool.py",
        "if job.attempt:",
        "if False:",
    ),
    Mutant(
        "tests/laws/test_failures.py::test_a_quarantined_task_is_not_played_again_also_after_a_resume",
        "rl/rollout/feeder.py",
        "if not self._passes(task):",
        "if True:",
    ),
    Mutant(
        "tests/laws/test_failures.py::test_a_quarantined_task_is_not_played_again_also_after_a_resume",
        "rl/quarantine.py",
        'self._held = {saved["task_id"]: Held(**saved) for saved in state["held"]}',
        "self._held = {}",
    ),
    Mutant(
        "tests/laws/test_failures.py::test_processes_hold_the_same_tasks_and_pass_them_alike",
        "rl/loop.py",
        'failures = [each for record in records for each in record["failures"]]',
        'failures = own["failures"]',
    ),
    Mutant(
        "tests/laws/test_failures.py::test_too_many_in_quarantine_are_an_error",
        "rl/quarantine.py",
        "met = max(min(self._met, self._tasks), _FEW)",
        "met = max(self._met, _FEW)",
    ),
    # -- chaos: a run ends whatever its worlds do, goes on wherever it was killed, and stops while a world hangs
    Mutant(
        "tests/chaos/test_kills.py::test_killed_at_a_random_moment_and_resumed_it_is_the_same_run",
        "launch/runs.py",
        'return restored.device, Progress(**restored.host["progress"])',
        'return restored.device, Progress(**{**restored.host["progress"], "ticket": 0})',
    ),
    Mutant(
        "tests/chaos/test_kills.py::test_a_stop_while_a_world_hangs_and_sampling_runs_ahead",
        "rl/loop.py",
        "if any(stopping for _, stopping in told):",
        "if False:",
    ),
    Mutant(
        "tests/chaos/test_kills.py::test_a_stop_while_a_world_hangs_and_sampling_runs_ahead",
        "rl/loop.py",
        "if progress.step > committed:",
        "if False:",
    ),
    Mutant(
        "tests/chaos/test_programs.py::test_a_run_over_worlds_that_fail_ends_and_counts_every_loss",
        "rl/rollout/table.py",
        'self.counts[f"members_{how}"] += 1',
        "pass",
    ),
    Mutant(
        "tests/chaos/test_programs.py::test_a_run_over_worlds_that_fail_ends_and_counts_every_loss",
        "launch/reinforce.py",
        'return {"tasks": tasks, "quarantine": parts.options["quarantine"].state_dict()}',
        'return {"tasks": tasks, "quarantine": {"met": 0, "held": []}}',
    ),
    Mutant(
        "tests/laws/test_abandon.py::test_a_critic_that_has_not_been_trained_gives_nothing_up",
        "rl/rollout/values.py",
        "if published.version < self._after:",
        "if False:",
    ),
    Mutant(
        "tests/laws/test_abandon.py::test_whom_no_term_could_judge_is_nobody_to_be_compared_with",
        "rl/loop.py",
        "sum(bool(np.isfinite(reward(t))) for t in compared)",
        "sum(t.status.scored for t in compared)",
    ),
    Mutant(
        "tests/rl/test_curriculum.py::test_who_was_given_up_has_failed_also_where_nothing_is_learnt_from_it",
        "rl/curriculum.py",
        "if math.isfinite(reward(t)) or t.status is Status.ABANDONED]",
        "if math.isfinite(reward(t))]",
    ),
    Mutant(
        "tests/rl/test_task_samplers.py::test_adarft_counts_from_the_first_ticket_that_is_drawn_after_an_update",
        "rl/task_samplers.py",
        '"first": undrawn,',
        '"first": next_ticket,',
    ),
    Mutant(
        "tests/rl/test_task_samplers.py::test_equal_scores_have_equal_chances_in_plr",
        "rl/task_samplers.py",
        "by_score = (np.bincount(same, rank ** (-1 / temperature)) / np.bincount(same))[same]",
        "by_score = rank ** (-1 / temperature)",
    ),
    Mutant(
        "tests/launch/test_train_rm.py::test_of_who_was_given_up_nobody_knows_the_end",
        "launch/train_rm.py",
        "if t.status.scored and t.status is not Status.ABANDONED and t.rows]",
        "if t.status.scored and t.rows]",
    ),
    Mutant(
        "tests/rl/test_pool.py::test_whatever_moves_is_progress",
        "rl/rollout/pool.py",
        "if running or moved != self._moved or now < self._table.not_before_s:",
        "if moved != self._moved or now < self._table.not_before_s:",
    ),
    Mutant(
        "tests/rl/test_pool.py::test_whatever_moves_is_progress",
        "rl/rollout/pool.py",
        "moved = (self._ended_calls(), *(engine.get(name) for name in _DID))",
        "moved = (*(engine.get(name) for name in _DID),)",
    ),
    Mutant(
        "tests/laws/test_failures.py::test_the_longer_the_infrastructure_fails_the_longer_nothing_begins",
        "rl/rollout/table.py",
        "return min(max(FIRST_PAUSE_S, lasted_s), MOST_PAUSE_S)",
        "return FIRST_PAUSE_S",
    ),
    Mutant(
        "tests/rl/test_pool.py::test_an_outage_is_fatal_only_when_it_lasts",
        "rl/rollout/pool.py",
        "in_row = table.failed_in_row if lasted_s >= self._outage_s else table.data_in_row",
        "in_row = table.failed_in_row",
    ),
    Mutant(
        "tests/rl/test_pool.py::test_after_a_pause_every_thread_that_has_work_begins",
        "rl/rollout/pool.py",
        "return bool(self._table.jobs) and not in_pause and self._in_flight < self._most_in_flight",
        "return bool(self._table.jobs) and self._in_flight < self._most_in_flight",
    ),
    Mutant(
        "tests/rl/test_pool.py::test_the_first_that_comes_through_ends_the_pause",
        "rl/rollout/table.py",
        "self.failed_in_row, self.data_in_row, self.not_before_s = 0, 0, -math.inf",
        "self.failed_in_row, self.data_in_row = 0, 0",
    ),
    Mutant(
        "tests/rl/test_concurrency.py::test_a_reset_that_takes_no_time_says_nothing_of_steps",
        "rl/rollout/pool.py",
        '"world_steps": sum(slot.steps for slot in self._slots + self._lost),',
        '"world_steps": self._ended_calls(),',
    ),
    Mutant(
        "tests/launch/test_ttrl.py::test_a_query_that_cannot_be_learnt_from_fails_alone",
        "launch/ttrl.py",
        'adapted = [record for record in done if "failed" not in record]',
        'adapted = [{"after": record["before"], **record} for record in done]',
    ),
    Mutant(
        "tests/rl/test_abandon.py::test_metrics_of_a_world_that_says_no_success",
        "rl/metrics/abandonment.py",
        "known, kept_known = ([t for t in those if not is_unlabelled(t)] for those in (audited, kept))",
        "known, kept_known = audited, kept",
    ),
    Mutant(
        "tests/rl/test_curriculum.py::test_what_comes_next_to_the_target_is_drawn_next_however_many_were_refused",
        "rl/curriculum.py",
        "undrawn = max(next_ticket, 1 + max(self._drawn, default=-1))",
        "undrawn = next_ticket + 4",
    ),
    Mutant(
        "tests/launch/test_build.py::test_no_call_that_a_plan_allows_is_a_hang",
        "launch/build.py",
        "watchdog_s=max(WATCHDOG_S, r.call_deadline_s + MARGIN_S, patience_s + MARGIN_S),",
        "watchdog_s=max(WATCHDOG_S, patience_s + MARGIN_S),",
    ),
    Mutant(
        "tests/launch/test_build.py::test_a_fleet_without_members_says_why_before_it_is_a_hang",
        "launch/worlds.py",
        "calls = CallLimit(r.calls_at_once or math.inf, fleet.ready, patience_s=fleet.patience_s)",
        "calls = CallLimit(r.calls_at_once or math.inf, fleet.ready)",
    ),
    Mutant(
        "tests/rl/test_checkpoint.py::test_every_folder_is_durable_before_the_name_is",
        "rl/checkpoint.py",
        'folders = sorted(p for p in temporary.rglob("*") if p.is_dir())',
        "folders = []",
    ),
    Mutant(
        "tests/rl/test_concurrency.py::test_a_controller_that_fails_does_not_hide_what_ended_the_block",
        "rl/rollout/concurrency.py",
        "thread.join()",
        "raise failure[0]",
    ),
    Mutant(
        "tests/launch/test_evaluate.py::test_who_is_held_out_is_asked_as_often_as_the_config_says",
        "launch/evaluate.py",
        '"samples": plan.eval.final_samples}',
        '"samples": 1}',
    ),
    Mutant(
        "tests/rl/test_batcher.py::test_each_minibatch_is_a_like_share_of_the_batch",
        "rl/rollout/batcher.py",
        "(own,) = np.nonzero(np.asarray(parts) == part)",
        "(own,) = np.nonzero(np.argsort(np.argsort(-lengths)) * minibatches // len(lengths) == part)",
    ),
    Mutant(
        "tests/rl/test_batcher.py::test_processes_with_few_episodes_do_not_begin_with_the_same_minibatch",
        "rl/rollout/batcher.py",
        "part = (kept[0].ticket + episodes) % minibatches",
        "part = episodes % minibatches",
    ),
    Mutant(
        "tests/launch/test_build.py::test_every_query_may_fail_before_a_pool_gives_up",
        "launch/build.py",
        "episodes = plan.ttrl.samples + 1 + MOST_REFUSED * plan.rl.group_size",
        "episodes = MOST_REFUSED * plan.rl.group_size",
    ),
    Mutant(
        "tests/envs/test_code_lessons.py::test_names_are_changed_where_they_stand_whatever_else_ends_a_line_elsewhere",
        "envs/code/lessons.py",
        "map(len, lines_of(text))",
        "map(len, text.splitlines(keepends=True))",
    ),
    Mutant(
        "tests/envs/test_code_lessons.py::test_words_of_comments_and_plain_strings_are_changed_like_names",
        "envs/code/lessons.py",
        'and "\\\\" not in token.string',
        "and token.string",
    ),
    Mutant(
        "tests/launch/test_report.py::test_a_world_without_searches_has_tables_too",
        "launch/report.py",
        "if all(line[when].get(name) is not None for",
        "if all(name in line[when] for",
    ),
    Mutant(
        "tests/launch/test_report.py::test_a_world_without_searches_has_tables_too",
        "launch/quickstart.py",
        'return "-" if summary["searches"] is None else f"{',
        'return f"{',
    ),
    Mutant(
        "tests/rl/test_judge.py::test_what_the_cache_cannot_say_is_asked_again",
        "rl/rewards/judge.py",
        'return _in_range(float(json.loads(file.read_text())["score"]))',
        'return float(json.loads(file.read_text())["score"])',
    ),
    Mutant(
        "tests/envs/test_code_suite.py::test_what_failed_is_shown",
        "envs/code/inside.py",
        "stream.flush()",
        "pass",
    ),
    Mutant(
        "tests/laws/test_code_grading.py::test_what_cannot_be_read_is_no_success",
        "envs/code/grade.py",
        "except (SyntaxError, ValueError, RecursionError, MemoryError, LookupError):",
        "except (SyntaxError, ValueError, MemoryError, LookupError):",
    ),
    Mutant(
        "tests/envs/test_sandbox.py::test_no_signal_ends_what_prepares_a_run",
        "envs/sandbox_server.py",
        "signal.signal(number, signal.SIG_IGN)",
        "pass",
    ),
    Mutant(
        "tests/envs/test_sandbox.py::test_what_is_kept_is_bounded_and_the_rest_is_named",
        "envs/sandbox_server.py",
        'if text is not None and fits("texts", path, text):',
        "if text is not None:",
    ),
    Mutant(
        "tests/envs/test_code_suite.py::test_a_call_has_its_time_of_the_processor_after_the_import",
        "envs/code/inside.py",
        "signal.setitimer(signal.ITIMER_REAL, _CALL_WALL_S)",
        "signal.setitimer(signal.ITIMER_REAL, _CALL_CPU_S)",
    ),
    Mutant(
        "tests/laws/test_code_grading.py::test_hidden_calls_that_were_stopped_are_asked_again",
        "envs/code/grade.py",
        'slow = before is None or any(got[i] == "! time" for i in wrong)',
        "slow = before is None",
    ),
    Mutant(
        "tests/laws/test_code_grading.py::test_the_share_of_hidden_calls_that_were_not_made_is_unknown",
        "envs/code/grade.py",
        'variants, stopped = float("nan") if data.get("variants") else 1.0, report.stopped',
        "variants, stopped = 1.0, report.stopped",
    ),
    Mutant(
        "tests/envs/test_sandbox.py::test_no_run_has_a_tree_or_another_run_in_its_memory",
        "envs/sandbox_server.py",
        "message, fds = _receive(link)",
        'message, fds = _receive(link); state.setdefault("", []).append([os.pread(fd, 9999, 0) for fd in fds[-1:]])',
    ),
    Mutant(
        "tests/envs/test_code_suite.py::test_the_worst_that_was_said_of_a_test_counts",
        "envs/code/suite.py",
        "if test not in outcomes or _RANK[outcome] >= _RANK[outcomes[test]]:",
        "if True:",
    ),
    Mutant(
        "tests/rl/test_masked.py::test_equal_numbers_are_whitened_to_0",
        "rl/masked.py",
        "return keep(x - centre, mask & differ)",
        "return keep(x - centre, mask)",
    ),
    Mutant(
        "tests/envs/test_code_instances.py::test_helpers_of_the_tests_are_the_tests",
        "envs/code/episode.py",
        "if _RUNS_TESTS.search(command):",
        "if True:",
    ),
    Mutant(
        "tests/envs/test_code_tools.py::test_a_block_with_two_separators_is_refused",
        "envs/code/tools.py",
        'return re.search(r"^={7}$", replace, re.MULTILINE) is not None',
        "return False",
    ),
    Mutant(
        "tests/envs/test_code_tools.py::test_lines_are_found_whatever_ends_them",
        "envs/code/tools.py",
        "if returns[first]:",
        "if False:",
    ),
    Mutant(
        "tests/envs/test_code_tools.py::test_a_file_has_one_name_in_a_diff",
        "envs/code/tools.py",
        'return str(pathlib.PurePosixPath(path[2:] if path.startswith(("a/", "b/")) else path))  # one file, one name',
        'return path[2:] if path.startswith(("a/", "b/")) else path',
    ),
    Mutant(
        "tests/envs/test_code_tasks.py::test_a_test_is_hidden_wherever_it_is_written",
        "envs/code/hiding.py",
        "todo += [(path, (base.id, parts[-1])) for base in bases if isinstance(base, ast.Name)]",
        "pass",
    ),
    Mutant(
        "tests/envs/test_code_tasks.py::test_a_task_whose_hidden_tests_can_be_run_is_none",
        "envs/code/tasks.py",
        'return report.ended and not {*task.data["f2p"], *paths} & set(report.outcomes)',
        "return report.ended",
    ),
    Mutant(
        "tests/envs/test_code_tasks.py::test_no_task_is_of_functions_of_two_splits",
        "envs/code/tasks.py",
        "if len({_split(base.package, site) for _, site in chosen}) > 1:",
        "if False:",
    ),
    Mutant(
        "tests/envs/test_code_tools.py::test_what_git_says_without_hunks_is_done",
        "envs/code/tools.py",
        'if old is not None and old != new and "copy from" not in header:',
        "if old is not None and old != new:",
    ),
    Mutant(
        "tests/envs/test_code_tasks.py::test_instances_are_read_and_refused",
        "envs/code/tasks.py",
        'return [task_from_json(line) for line in body.split("\\n") if line]',
        "return [task_from_json(line) for line in body.splitlines()]",
    ),
    Mutant(
        "tests/envs/test_code_instances.py::test_what_the_gold_suite_does_and_takes_is_measured_once",
        "envs/code/repositories.py",
        'return dataclasses.replace(task, data={**task.data, "events": events, "seconds": seconds})',
        "return task",
    ),
    Mutant(
        "tests/envs/test_code_instances.py::test_what_the_patches_add_is_not_there_to_be_seen",
        "envs/code/repositories.py",
        "return {**self.buggy, **dict.fromkeys(self.absent)}",
        "return dict(self.buggy)",
    ),
    Mutant(
        "tests/envs/test_code_instances.py::test_helpers_of_the_tests_are_the_tests",
        "envs/code/repositories.py",
        'helpers = {*test_patch, *(f"{folder}/" for folder in (folders | beside) - mixed)}',
        "helpers = {*test_patch}",
    ),
    Mutant(
        "tests/envs/test_code_instances.py::test_a_fix_of_what_is_no_module_is_taken_over_where_the_gold_patch_is",
        "envs/code/packages.py",
        "return (inside or path in package.sources) and not is_test(package, path)",
        "return inside and not is_test(package, path)",
    ),
    Mutant(
        "tests/envs/test_tool_calls.py::test_a_call_without_an_object_swallows_no_other",
        "envs/tool_calls.py",
        "if _VALUE.match(text, start) else None",
        "if True else None",
    ),
    Mutant(
        "tests/envs/test_answers.py::test_normaliser_keeps_the_answer",
        "envs/answers.py",
        'return f" {char} "  # x+1, <5, √2',
        'return ""',
    ),
    Mutant(
        "tests/rl/test_rewards.py::test_a_limit_is_failure",
        "rl/rewards/outcome.py",
        "trajectory.status in ENDED and bool(",
        "trajectory.status is Status.DONE and bool(",
    ),
    Mutant(
        "tests/rl/test_task_samplers.py::test_easy_to_hard_lets_in_no_task_more_by_rounding",
        "rl/task_samplers.py",
        "len(order) - 1e-9)",
        "len(order))",
    ),
    Mutant(
        "tests/rl/test_worker.py::test_what_a_world_reports_is_what_it_was_then",
        "rl/rollout/worker.py",
        "facts=copy.deepcopy(trajectory.facts))",
        "facts=trajectory.facts)",
    ),
    Mutant(
        "tests/rl/test_worker.py::test_an_answer_that_cannot_even_be_read_is_an_env_error",
        "rl/rollout/worker.py",
        'guarded("step\'s answer", _stepped, answer, env.spec)',
        "_stepped(answer, env.spec)",
    ),
    Mutant(
        "tests/rl/test_types.py::test_an_empty_text_of_numpy_comes_back",
        "rl/types.py",
        "if np.dtype(dtype).itemsize:",
        "if True:",
    ),
    Mutant(
        "tests/laws/test_failures.py::test_of_a_text_of_any_length_and_any_characters_little_is_looked_at",
        "envs/failures.py",
        "text[:_LOOKED_AT_CHARS])",
        "text)",
    ),
    Mutant(
        "tests/rl/test_hosts.py::test_an_error_is_told_once_and_raised_by_all",
        "rl/hosts.py",
        '{type(error).__name__}: {said(error)}"',
        '{type(error).__name__}: {error}"',
    ),
    Mutant(
        "tests/rl/test_rewards.py::test_a_world_may_report_what_it_likes",
        "rl/metrics/episodes.py",
        "known = [float(v) for v in values if abs(v) < _TOO_LARGE]",
        "known = [float(v) for v in values]",
    ),
    Mutant(
        "tests/rl/test_episodes.py::test_each_process_has_a_file_and_one_that_is_gone_leaves_none_of_later_steps",
        "rl/episodes.py",
        "if first_step is not None and step >= first_step:",
        "if first_step is not None and step >= first_step and _step_and_process(path)[1]:",
    ),
    Mutant(
        "tests/rl/test_curriculum.py::test_a_world_without_labels_may_be_given_up_on",
        "rl/rewards/outcome.py",
        'return trajectory.status in ENDED and "success" not in trajectory.facts',
        'return trajectory.status is Status.DONE and "success" not in trajectory.facts',
    ),
    Mutant(
        "tests/rl/test_concurrency.py::test_the_turns_of_those_who_never_come_back_are_handed_over_when_they_are_refused",
        "rl/rollout/concurrency.py",
        "                    self._line.append((holder, goes_on))\n            self._hand_over()",
        "                    self._line.append((holder, goes_on))",
    ),
    Mutant(
        "tests/laws/test_learner.py::test_a_part_of_an_episode_is_a_mean_over_that_part",
        "rl/learner.py",
        "count = jnp.where(loss.count > 0, loss.count, 1)",
        "count = jnp.maximum(loss.count, 1)",
    ),
    Mutant(
        "tests/launch/test_policy.py::test_a_run_needs_only_its_folder_and_exports_what_it_trained",
        "launch/evaluate.py",
        'folder=f"episodes_{split}", first_step=len(samplings))',
        'folder=f"episodes_{split}")',
    ),
    Mutant(
        "tests/rl/test_checkpoint.py::test_a_name_that_is_not_durable_is_not_written",
        "rl/checkpoint.py",
        "_fsync(self.folder)  # until then the new name may be lost",
        "pass",
    ),
    Mutant(
        "tests/launch/test_draws.py::test_of_another_data_set_no_task_is_held",
        "launch/draws.py",
        'if same and "quarantine" in host:',
        'if "quarantine" in host:',
    ),
    Mutant(
        "tests/laws/test_abandon.py::test_an_evaluation_of_its_own_is_adapted_like_training",
        "launch/build.py",
        "as own, adapted(plan, engine, own):",
        "as own:",
    ),
    Mutant(
        "tests/rl/test_engine_metrics.py::test_what_a_pool_did_and_lost_in_a_step",
        "rl/metrics/engine.py",
        '"rollout/fleet_members": now["fleet_members"]}',
        '"rollout/fleet_members": now["fleet_members"] - before["fleet_members"]}',
    ),
    Mutant(
        "tests/launch/test_fleet.py::test_where_the_worlds_are_changes_nothing",
        "launch/worlds.py",
        "yield Placed(fleet.make_env, calls, fleet.stats)",
        "yield Placed(fleet.make_env, calls)",
    ),
    Mutant(
        "tests/envs/test_fleet.py::test_a_process_that_dies_says_how_and_its_place_is_filled",
        "envs/fleet/process.py",
        "except Exception as error:  # the world's own code can write to any descriptor of its process",
        "except OSError as error:",
    ),
    Mutant(
        "tests/envs/test_fleet.py::test_a_process_that_dies_says_how_and_its_place_is_filled",
        "envs/fleet/process.py",
        "except ValueError:  # of the real-time signals only the first and the last have names",
        "except KeyError:",
    ),
    Mutant(
        "tests/rl/test_checkpoint.py::test_an_old_checkpoint_that_is_damaged_stops_no_save",
        "rl/checkpoint.py",
        "found = self._readable()",
        "found = _manifests(self.folder)",
    ),
    Mutant(
        "tests/rl/test_checkpoint.py::test_what_fails_after_the_commit_does_not_say_that_nothing_was_written",
        "rl/checkpoint.py",
        "if isinstance(error, CheckpointError):  # of what follows the commit",
        "if False:",
    ),
    Mutant(
        "tests/rl/test_checkpoint.py::test_only_folders_are_checkpoints_and_a_manifest_is_whole",
        "rl/checkpoint.py",
        "if p.name.isdecimal() and p.is_dir())",
        "if p.name.isdecimal())",
    ),
    Mutant(
        "tests/rl/test_concurrency.py::test_turns_are_handed_over_first_come_first_served",
        "rl/rollout/concurrency.py",
        "holder, goes_on = self._line.popleft()",
        "holder, goes_on = self._line.pop()",
    ),
    Mutant(
        "tests/rl/test_concurrency.py::test_turns_are_handed_over_first_come_first_served",
        "rl/rollout/concurrency.py",
        "self._line.append((holder, goes_on))\n                self._hand_over()",
        "self._line.appendleft((holder, goes_on))\n                self._hand_over()",
    ),
    Mutant(
        "tests/rl/test_worker.py::test_what_is_longer_than_a_row_is_not_encoded",
        "rl/rollout/worker.py",
        "if _fit_in_no_row(codec, answers, max_tokens):",
        "if False:",
    ),
    Mutant(
        "tests/models/test_codec.py::test_a_text_has_no_fewer_ids_than_its_length_says",
        "models/codec.py",
        'model, composed = spec["model"], {None: 1, "NFC": 4}.get((spec["normalizer"] or {}).get("type"))',
        'model, composed = spec["model"], {None: 1, "NFC": 1}.get((spec["normalizer"] or {}).get("type"))',
    ),
    Mutant(
        "tests/models/test_codec.py::test_a_text_has_no_fewer_ids_than_its_length_says",
        "models/codec.py",
        "return math.ceil(len(text.strip()) / self._characters_of_an_id)  # a template may strip it",
        "return math.ceil(len(text) / self._characters_of_an_id)",
    ),
    Mutant(
        "tests/models/test_codec.py::test_a_tokenizer_of_another_kind_says_nothing_by_length",
        "models/codec.py",
        'whole = whole and not any(each.get("behavior") == "Removed" for each in cuts)',
        "whole = bool(whole)",
    ),
    Mutant(
        "tests/launch/test_runs.py::test_after_the_first_signal_either_kills",
        "launch/runs.py",
        "for number in numbers:\n            signal.signal(number, signal.SIG_DFL)",
        "signal.signal(_[0], signal.SIG_DFL)",
    ),
    Mutant(
        "tests/launch/test_runs.py::test_who_stopped_before_the_first_step_saved_nothing",
        "launch/runs.py",
        'saved_what = "the checkpoint is written" if progress.step else "nothing was there to save"',
        'saved_what = "the checkpoint is written"',
    ),
)


def find(mutant: Mutant, root: Path = ROOT) -> tuple[str, int]:
    """The file's text and where the line begins. Errors: the line is not there exactly once."""
    text = (root / mutant.file).read_text()
    count = text.count(mutant.line)
    if count != 1:
        raise ValueError(
            f"{mutant.file}: got {count} times {mutant.line!r}, want once; bring tests/laws/mutants.py up to date"
        )
    return text, text.index(mutant.line)


def survives(mutant: Mutant) -> str | None:
    """Runs the law over the broken line. None if it fails as it must, else what happened instead."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                shutil.copy(source, copy / name)
        text, at = find(mutant, copy)
        (copy / mutant.file).write_text(text[:at] + mutant.broken + text[at + len(mutant.line) :])
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", mutant.test]
        # Not ours: an editable install must not put the unbroken tree first.
        env = {**os.environ, "PYTHONPATH": str(copy), "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".pytest_cache" / "jax")}
        try:
            done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return f"ran past {TIMEOUT_S} s"
    # 1 = a test failed; 2..5 = pytest itself could not run it, which proves nothing.
    return (
        None
        if done.returncode == 1
        else f"pytest ended with {done.returncode}:\n{done.stdout[-1500:]}{done.stderr[-500:]}"
    )


def main(words: list[str]) -> int:
    chosen = [m for m in MUTANTS if all(w in f"{m.file} {m.test} {m.line}" for w in words)]
    if not chosen:
        print(f"error: no mutant matches {words}; there are {len(MUTANTS)}", file=sys.stderr)
        return 2
    alive = 0
    for mutant in chosen:
        begun = time.monotonic()
        problem = survives(mutant)
        alive += problem is not None
        verdict = "red, as it must" if problem is None else f"SURVIVED ({problem})"
        print(
            f"{mutant.file}: {mutant.broken.partition(chr(10))[0]!r} -> {mutant.test}: {verdict}"
            f" [{time.monotonic() - begun:.0f} s]",
            flush=True,
        )
    print(f"{len(chosen) - alive} of {len(chosen)} mutants turned their law red")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

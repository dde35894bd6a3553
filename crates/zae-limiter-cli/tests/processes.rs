//! The program as a process: many at once, interrupted, killed, with a closed pipe.
#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

use std::io::{BufRead as _, BufReader, Read as _};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Output, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// A limit that does not refill while a test runs.
const LIMIT: &str = "runs:10/day";

fn zael(folder: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_zae-limiter"));
    command
        .args(["--store", &format!("sqlite:{}", folder.join("limits.db").display())])
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

fn acquire(folder: &Path, rest: &[&str]) -> Command {
    zael(folder, &[&["acquire", "job", "machine", "-c", "runs:1", "-l", LIMIT], rest].concat())
}

/// A file with a bucket in it, of which one token is taken.
fn folder_with_nine_left() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let first = acquire(folder.path(), &[]).output().unwrap();
    assert!(first.status.success(), "{first:?}");
    assert_eq!(left(folder.path()), 9);
    folder
}

/// The tokens in the bucket, read by a call that takes nothing.
fn left(folder: &Path) -> i64 {
    let args = ["acquire", "job", "machine", "-c", "runs:0", "-l", LIMIT, "-o", "json"];
    let output = zael(folder, &args).output().unwrap();
    let document: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    document["limits"][0]["available"].as_i64().unwrap()
}

fn signal(child: &Child, signal: Signal) {
    let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
    // Fails only if the process has ended already.
    let _ = kill_process(pid, signal);
}

/// Starts a command that runs until its input ends, and returns once it runs.
fn start_and_see_it_run(folder: &Path, script: &str) -> (Child, ChildStdin) {
    let mut child = acquire(folder, &["--", "sh", "-c", script]).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "running\n");
    let stdin = child.stdin.take().unwrap();
    (child, stdin)
}

#[test]
fn forty_at_once_are_ten_admitted_and_thirty_refused() {
    let folder = tempfile::tempdir().unwrap();
    let children: Vec<Child> =
        (0..40).map(|_| acquire(folder.path(), &[]).spawn().unwrap()).collect();
    let outputs: Vec<Output> =
        children.into_iter().map(|child| child.wait_with_output().unwrap()).collect();
    let with = |code| outputs.iter().filter(|output| output.status.code() == Some(code)).count();
    assert_eq!((with(0), with(5)), (10, 30), "{outputs:#?}");
}

#[test]
fn the_commands_own_status_is_returned_and_a_failure_refunds() {
    let folder = folder_with_nine_left();
    for (script, status, left_after) in [
        ("exit 0", 0, 8),
        ("exit 1", 1, 8),
        ("exit 5", 5, 8),
        ("exit 77", 77, 8),
        ("kill -KILL $$", 137, 8),
        ("echo out; echo err >&2", 0, 7),
    ] {
        let output = acquire(folder.path(), &["--", "sh", "-c", script]).output().unwrap();
        assert_eq!(output.status.code(), Some(status), "{script}: {output:?}");
        assert_eq!(left(folder.path()), left_after, "{script}");
        if script.starts_with("echo") {
            assert_eq!((&*output.stdout, &*output.stderr), (&b"out\n"[..], &b"err\n"[..]));
        }
    }
}

#[test]
fn an_adjustment_is_written_when_the_command_has_succeeded_and_only_then() {
    let folder = folder_with_nine_left();
    let run = |script| {
        acquire(folder.path(), &["--adjust", "runs:3", "--", "sh", "-c", script]).output().unwrap()
    };
    assert!(!run("exit 1").status.success());
    assert_eq!(left(folder.path()), 9);
    assert!(run("exit 0").status.success());
    assert_eq!(left(folder.path()), 5);
}

#[test]
fn a_command_that_cannot_be_started_takes_nothing() {
    let folder = folder_with_nine_left();
    for (program, status) in [("./no-such-program", 127), ("/", 126)] {
        let output = acquire(folder.path(), &["--", program]).output().unwrap();
        assert_eq!(output.status.code(), Some(status), "{output:?}");
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(stderr.contains("could not start") && stderr.contains("refunded"), "{stderr}");
        assert_eq!(left(folder.path()), 9);
    }
}

#[test]
fn nothing_runs_when_a_limit_refuses() {
    let folder = tempfile::tempdir().unwrap();
    let args = ["acquire", "job", "machine", "-c", "runs:10", "-l", LIMIT];
    assert!(zael(folder.path(), &args).output().unwrap().status.success());
    let output = acquire(folder.path(), &["--", "echo", "running"]).output().unwrap();
    assert_eq!((output.status.code(), output.stdout.len()), (Some(5), 0), "{output:?}");
}

#[test]
fn an_interrupted_command_is_refunded() {
    let folder = folder_with_nine_left();
    for (sent, status) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let (child, stdin) = start_and_see_it_run(folder.path(), "echo running; exec cat");
        assert_eq!(left(folder.path()), 8, "taken while the command runs");
        signal(&child, sent);
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(status), "{output:?}");
        assert_eq!(left(folder.path()), 9);
        drop(stdin);
    }
}

#[test]
fn a_command_that_cleans_up_is_waited_for() {
    let folder = folder_with_nine_left();
    // The shell ends at the first signal, but only after its input has ended.
    let script =
        "trap 'cat; echo cleaned; exit 3' TERM; echo running; while :; do read -r line; done";
    let (mut child, mut stdin) = start_and_see_it_run(folder.path(), script);
    signal(&child, Signal::TERM);
    std::io::Write::write_all(&mut stdin, b"x\n").unwrap();
    drop(stdin);
    let mut rest = String::new();
    child.stdout.take().unwrap().read_to_string(&mut rest).unwrap();
    assert!(rest.ends_with("cleaned\n"), "{rest:?}");
    assert_eq!(child.wait().unwrap().code(), Some(3));
    assert_eq!(left(folder.path()), 9);
}

#[test]
fn a_second_interrupt_kills_a_command_that_ignores_the_first() {
    let folder = folder_with_nine_left();
    let script = "trap '' TERM; echo running; while :; do read -r line || :; done";
    let (mut child, _stdin) = start_and_see_it_run(folder.path(), script);
    // Pending signals of one kind merge into one, so send until it has ended.
    while child.try_wait().unwrap().is_none() {
        signal(&child, Signal::TERM);
        std::thread::yield_now();
    }
    assert_eq!(child.wait().unwrap().code(), Some(137));
    assert_eq!(left(folder.path()), 9);
}

#[test]
fn a_wait_can_be_interrupted() {
    let folder = tempfile::tempdir().unwrap();
    let all = ["acquire", "job", "machine", "-c", "runs:10", "-l", LIMIT, "-q"];
    assert!(zael(folder.path(), &all).output().unwrap().status.success());
    let child = acquire(folder.path(), &["--wait", "1d", "-v"]).spawn().unwrap();
    // Sent until it has an effect. Before the program installs its handler, the signal kills it.
    let mut child = child;
    while child.try_wait().unwrap().is_none() {
        signal(&child, Signal::INT);
        std::thread::yield_now();
    }
    let status = child.wait().unwrap();
    let by_signal = std::os::unix::process::ExitStatusExt::signal(&status);
    assert!(status.code() == Some(130) || by_signal == Some(2), "{status:?}");
    assert_eq!(left(folder.path()), 0);
}

/// Interrupts or kills it after a number of polls, from before its start to long after.
fn interrupted_after(folder: &Path, looks: u32, sent: Signal) {
    let mut child = acquire(folder, &["--", "cat"]).spawn().unwrap();
    let stdin = child.stdin.take();
    for _ in 0..looks {
        if child.try_wait().unwrap().is_some() {
            break;
        }
    }
    signal(&child, sent);
    // After a kill the command is an orphan and ends with its input.
    drop(stdin);
    child.wait().unwrap();
}

/// Whether Ctrl-C was ignored when the tests were started, as in the background of a script. The program then ignores it,
/// too, until it has its own handlers: an earlier one would be lost.
fn is_interrupt_ignored() -> bool {
    const SIGINT_BIT: u64 = 1 << 1;
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.map(|mask| u64::from_str_radix(mask.trim(), 16).unwrap());
    ignored.is_some_and(|mask| mask & SIGINT_BIT != 0)
}

#[test]
fn an_interrupt_at_any_moment_refunds_everything() {
    let folder = folder_with_nine_left();
    for round in 0..40_u32 {
        let is_interrupt = round % 2 == 0 && !is_interrupt_ignored();
        let sent = if is_interrupt { Signal::INT } else { Signal::TERM };
        let looks = 1_u32 << (round / 2 % 20);
        let mut child = acquire(folder.path(), &["--", "cat"]).spawn().unwrap();
        let stdin = child.stdin.take();
        for _ in 0..looks {
            assert!(child.try_wait().unwrap().is_none(), "it runs as long as its input is open");
        }
        signal(&child, sent);
        let status = child.wait().unwrap();
        assert!(!status.success());
        drop(stdin);
        assert_eq!(left(folder.path()), 9, "round {round}, after {looks} looks");
    }
}

#[test]
fn a_kill_at_any_moment_loses_no_more_than_was_taken() {
    for round in 0..20_u32 {
        let folder = folder_with_nine_left();
        interrupted_after(folder.path(), 1 << round, Signal::KILL);
        let left = left(folder.path());
        assert!(left == 8 || left == 9, "round {round}: {left} left");
    }
}

#[test]
fn a_closed_pipe_is_not_an_error() {
    let folder = folder_with_nine_left();
    let mut child = acquire(folder.path(), &[]).spawn().unwrap();
    drop(child.stdout.take());
    drop(child.stderr.take());
    let status = child.wait().unwrap();
    assert_eq!(status.code(), Some(0), "admitted is admitted");
    assert_eq!(left(folder.path()), 8);
    let mut child = zael(folder.path(), &["--help"]).spawn().unwrap();
    drop(child.stdout.take());
    assert_eq!(child.wait_with_output().unwrap().status.code(), Some(0));
}

#[test]
fn output_that_cannot_be_written_is_an_error() {
    let folder = folder_with_nine_left();
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let output = zael(folder.path(), &["version"]).stdout(full).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.starts_with("error: could not write the output"), "{stderr}");
}

#[cfg(feature = "aws")]
#[test]
fn the_executable_has_the_mark_of_its_release_and_other_programs_have_none() {
    let has_mark = |file: &Path| {
        let program = std::fs::read(file).unwrap();
        zae_limiter_infra::release_of(&program).map(str::to_owned)
    };
    let program = Path::new(env!("CARGO_BIN_EXE_zae-limiter"));
    assert_eq!(has_mark(program).as_deref(), Some(env!("CARGO_PKG_VERSION")));
    // This test links the crate, too.
    assert_eq!(has_mark(&std::env::current_exe().unwrap()), None);
}

/// Runs the program with the umask that hides nothing, on its default store.
fn in_home(home: &Path, script: &str) -> Output {
    let mut command = Command::new("sh");
    command
        .args([
            "-c",
            &format!("umask 000; exec \"$0\" {script}"),
            env!("CARGO_BIN_EXE_zae-limiter"),
        ])
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap())
        .env("HOME", home)
        .env("TMPDIR", home);
    command.output().unwrap()
}

#[test]
fn others_cannot_read_the_default_store() {
    use std::os::unix::fs::PermissionsExt as _;
    let home = tempfile::tempdir().unwrap();
    // While the command runs, the log files of SQLite exist.
    let folder = home.path().join(".local/share/zae-limiter");
    let script = format!(
        "acquire job machine -c runs:1 -l runs:3 -- sh -c 'cd {}; stat -c \"%a %n\" . *'",
        folder.display()
    );
    let output = in_home(home.path(), &script);
    assert!(output.status.success(), "{output:?}");
    let listed = String::from_utf8(output.stdout).unwrap();
    let mut lines: Vec<&str> = listed.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["600 limits.db", "600 limits.db-shm", "600 limits.db-wal", "700 ."]);

    // A file that others may read on purpose stays as it is.
    let file = folder.join("limits.db");
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o640)).unwrap();
    assert!(in_home(home.path(), "resource list").status.success());
    assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o640);
}

/// Starts a command and returns once it has printed its first line.
fn start_and_see_a_line(mut command: Command) -> Child {
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert!(!line.is_empty());
    child
}

fn namespaces(folder: &Path) -> Vec<String> {
    let mut names = Vec::new();
    for list in ["list", "orphans"] {
        let output = zael(folder, &["namespace", list, "-o", "json"]).output().unwrap();
        let found: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let found = found.as_array().unwrap().iter();
        names.extend(found.map(|namespace| namespace["name"].as_str().unwrap().to_owned()));
    }
    names
}

/// Whether the program handles SIGHUP here: not under `nohup`, and only on Linux.
fn is_handled(signal: Signal) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    signal != Signal::HUP || ignored.is_some_and(|mask| mask & 1 == 0)
}

#[test]
fn an_interrupted_demo_leaves_nothing_behind() {
    for (sent, status) in [(Signal::INT, 130), (Signal::TERM, 143), (Signal::HUP, 129)] {
        if !is_handled(sent) {
            continue;
        }
        let folder = tempfile::tempdir().unwrap();
        let child = start_and_see_a_line(zael(folder.path(), &["demo"]));
        signal(&child, sent);
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(status), "{output:?}");
        assert_eq!(namespaces(folder.path()), ["default"]);

        // On its default store it has a temporary folder.
        let mut demo = Command::new(env!("CARGO_BIN_EXE_zae-limiter"));
        demo.arg("demo").env("TMPDIR", folder.path()).env_remove("ZAEL_STORE");
        let child = start_and_see_a_line(demo);
        signal(&child, sent);
        assert_eq!(child.wait_with_output().unwrap().status.code(), Some(status));
        let left = std::fs::read_dir(folder.path()).unwrap();
        let left: Vec<_> = left.map(|file| file.unwrap().file_name()).collect();
        assert_eq!(left, ["limits.db"]);
    }
}

#[test]
fn the_next_demo_removes_the_folder_of_a_killed_one_but_not_that_of_a_running_one() {
    let folder = tempfile::tempdir().unwrap();
    let demo = |seconds: &str| {
        let mut demo = Command::new(env!("CARGO_BIN_EXE_zae-limiter"));
        demo.args(["demo", "--seconds", seconds]);
        demo.env("TMPDIR", folder.path()).env_remove("ZAEL_STORE");
        demo
    };
    let mut killed = start_and_see_a_line(demo("3600"));
    let mut running = start_and_see_a_line(demo("3600"));
    let count = || std::fs::read_dir(folder.path()).unwrap().count();
    assert_eq!(count(), 2);
    signal(&killed, Signal::KILL);
    killed.wait().unwrap();
    assert_eq!(count(), 2, "nobody could clean up");
    assert!(demo("1").output().unwrap().status.success());
    assert_eq!(count(), 1);
    signal(&running, Signal::INT);
    running.wait().unwrap();
    assert_eq!(count(), 0);
}

#[test]
fn an_interrupted_bench_leaves_nothing_behind_and_a_killed_one_leaves_what_the_list_explains() {
    let folder = tempfile::tempdir().unwrap();
    for (sent, status) in
        [(Signal::TERM, Some(143)), (Signal::HUP, Some(129)), (Signal::KILL, None)]
    {
        if !is_handled(sent) {
            continue;
        }
        let mut bench = zael(folder.path(), &["bench", "--duration", "1h", "--entities", "10"]);
        let mut child = bench.spawn().unwrap();
        // Its namespace is the sign that it runs.
        while namespaces(folder.path()).len() == 1 {
            assert!(child.try_wait().unwrap().is_none());
        }
        signal(&child, sent);
        assert_eq!(child.wait().unwrap().code(), status);
        let left = namespaces(folder.path());
        assert_eq!(left.len(), if sent == Signal::KILL { 2 } else { 1 }, "{left:?}");
    }
    let output = zael(folder.path(), &["namespace", "list"]).output().unwrap();
    let listed = String::from_utf8(output.stdout).unwrap();
    assert!(listed.contains("temporary, of bench"), "{listed}");
}

#[cfg(feature = "aws")]
#[test]
fn a_source_of_credentials_that_does_not_answer_is_named() {
    // The kernel accepts connections; nobody reads them.
    let source = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let home = tempfile::tempdir().unwrap();
    let uri = format!("http://{}/credentials", source.local_addr().unwrap());
    let output = Command::new(env!("CARGO_BIN_EXE_zae-limiter"))
        .env_clear()
        .env("HOME", home.path())
        .env("AWS_CONTAINER_CREDENTIALS_FULL_URI", uri)
        .env("ZAEL_AWS_TIMEOUT", "150ms")
        .args(["status", "--name", "my-app", "--region", "us-east-1"])
        .output()
        .unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(3), "{said}");
    assert!(
        said.contains("the source of the AWS credentials did not answer within 150 ms"),
        "{said}"
    );
}

#[test]
fn the_status_is_that_of_the_command_also_if_the_tokens_cannot_be_settled() {
    for code in [0, 7] {
        let folder = tempfile::tempdir().unwrap();
        let script = format!("rm {}/limits.db*; exit {code}", folder.path().display());
        let args = ["acquire", "k", "g", "-c", "rpm:3", "-l", "rpm:9", "--adjust", "rpm:1"];
        let mut command = zael(folder.path(), &args);
        let output = command.args(["--", "sh", "-c", &script]).output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{output:?}");
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(stderr.contains("was replaced or removed while it was open"), "{stderr}");
    }
}

#[test]
fn only_the_owner_can_read_a_new_file_behind_a_link() {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("target.db");
    std::os::unix::fs::symlink(&target, folder.path().join("limits.db")).unwrap();
    assert!(zael(folder.path(), &["resource", "list"]).output().unwrap().status.success());
    assert_eq!(target.metadata().unwrap().permissions().mode() & 0o777, 0o600);
}

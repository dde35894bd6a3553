//! Attacks on the promises about AWS credentials (`docs/dynamodb.md`, `docs/unavailability.md`): errors name the profile
//! and what to do, show no secret, and come in time. No call reaches AWS: loading fails before.
#![cfg(unix)]

use std::process::{Command, Stdio};

const SECRET: &str = "hunter2";

/// Runs `list` with these profiles in a home folder of its own, killed after twenty seconds. Returns its exit status
/// and its messages.
fn list(config: &str, env: &[(&str, &str)], before: &str) -> (Option<i32>, String) {
    let home = tempfile::tempdir().unwrap();
    std::fs::create_dir(home.path().join(".aws")).unwrap();
    std::fs::write(home.path().join(".aws/config"), config).unwrap();
    let script = format!("{before}exec timeout -s KILL 20 \"$PROGRAM\" list");
    let output = Command::new("bash")
        .args(["-c", &script])
        .env_clear()
        .env("PROGRAM", env!("CARGO_BIN_EXE_zae-limiter"))
        .env("HOME", home.path())
        .env("PATH", "/usr/bin:/bin")
        .env("AWS_REGION", "us-east-1")
        .env("AWS_EC2_METADATA_DISABLED", "true")
        .env("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        .env("ZAEL_AWS_TIMEOUT", "1s")
        .envs(env.iter().copied())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!said.contains(SECRET), "{said}");
    (output.status.code(), said)
}

const DEV: (&str, &str) = ("AWS_PROFILE", "dev");
const ROLE: &str =
    "[profile dev]\nrole_arn = arn:aws:iam::123456789012:role/a\nsource_profile = origin\n";

/// "A command ends within these times, whatever AWS does: 10 s for loading credentials." The file is a pipe that
/// nobody writes to, as on a home folder of a server that hangs.
#[test]
fn a_configuration_file_that_does_not_answer_ends_at_the_limit() {
    for file in ["AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"] {
        let pipe = format!("mkfifo \"$HOME/pipe\"; export {file}=\"$HOME/pipe\"; ");
        let (status, said) = list("", &[], &pipe);
        assert_eq!(status, Some(3), "{file}: {said}");
    }
}

/// "Errors name the profile and the command to run": it is the source profile that has the single sign-on. `aws sso
/// login --profile dev` fails, because dev has none.
#[test]
fn the_single_sign_on_of_a_source_profile_is_named() {
    let sso = "[profile origin]\nsso_session = s\nsso_account_id = 123456789012\nsso_role_name = r\n\
               [sso-session s]\nsso_region = eu-west-1\nsso_start_url = https://example.awsapps.com/start\n";
    let (status, said) = list(&format!("{ROLE}{sso}"), &[DEV], "");
    assert_eq!(status, Some(1), "{said}");
    assert!(said.contains("aws sso login --profile origin"), "{said}");
}

/// The same for a process: dev has none, so nobody can "run its command by hand".
#[test]
fn the_process_of_a_source_profile_is_named() {
    let process = format!("[profile origin]\ncredential_process = echo {SECRET}; exit 4\n");
    let (status, said) = list(&format!("{ROLE}{process}"), &[DEV], "");
    assert_eq!(status, Some(1), "{said}");
    assert!(said.contains("profile origin"), "{said}");
}

/// "A missing profile is an error" that names it, also as the source of a role, and so is a missing sso-session.
#[test]
fn what_a_profile_refers_to_and_lacks_is_named() {
    let session =
        "[profile dev]\nsso_session = origin\nsso_account_id = 123456789012\nsso_role_name = r\n";
    for config in [ROLE, session] {
        let (status, said) = list(config, &[DEV], "");
        assert_eq!(status, Some(1), "{said}");
        assert!(said.contains("origin"), "{said}");
    }
}

/// "Errors say what happened and what to do next": these sources are variables, and no profile can mend them.
#[test]
fn a_source_that_is_a_variable_is_named() {
    for (env, other) in [
        (("AWS_CONTAINER_CREDENTIALS_FULL_URI", "http://example.org/x"), ("A", "b")),
        (
            ("AWS_WEB_IDENTITY_TOKEN_FILE", "/nowhere"),
            ("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/a"),
        ),
    ] {
        let (status, said) = list("", &[env, other], "");
        assert_eq!(status, Some(1), "{said}");
        assert!(said.contains(env.0) || said.contains(env.1), "{}: {said}", env.0);
    }
}

//! More attacks on the promises about AWS credentials (`docs/dynamodb.md`): what is set wrongly is an error, and the
//! program does not go on with the credentials of the machine. The AWS CLI does not either.
#![cfg(unix)]

use std::io::Write as _;
use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

use crate::aws::read_request;

/// A container that offers credentials, and AWS. Returns its address and the requests.
fn container() -> (String, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let requests: Arc<Mutex<Vec<String>>> = Arc::default();
    let kept = Arc::clone(&requests);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (mut stream, kept) = (stream.unwrap(), Arc::clone(&kept));
            std::thread::spawn(move || {
                while let Some(request) = read_request(&mut stream) {
                    let body = match request.starts_with("GET /container") {
                        true => {
                            r#"{"AccessKeyId": "FROM-CONTAINER", "SecretAccessKey": "x", "Token": "x",
                                "Expiration": "2099-01-01T00:00:00Z"}"#
                        }
                        false => {
                            "<DescribeStacksResponse><DescribeStacksResult><Stacks/></DescribeStacksResult>\
                             </DescribeStacksResponse>"
                        }
                    };
                    kept.lock().unwrap().push(request);
                    let length = body.len();
                    let answer =
                        format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n{body}");
                    let _ = stream.write_all(answer.as_bytes());
                }
            });
        }
    });
    (url, requests)
}

/// Runs `list` in a container with these profiles, in which `{url}` is the address of AWS. Without that, a variable names
/// the address. Returns the exit status and the messages.
fn list(config: &str, env: &[(&str, &str)]) -> (Option<i32>, String) {
    let home = tempfile::tempdir().unwrap();
    std::fs::create_dir(home.path().join(".aws")).unwrap();
    let (url, requests) = container();
    std::fs::write(home.path().join(".aws/config"), config.replace("{url}", &url)).unwrap();
    let endpoint = (!config.contains("{url}")).then_some(("AWS_ENDPOINT_URL", &url));
    let output = Command::new(env!("CARGO_BIN_EXE_zae-limiter"))
        .arg("list")
        .env_clear()
        .env("HOME", home.path())
        .env("PATH", "/usr/bin:/bin")
        .env("AWS_REGION", "us-east-1")
        .env("AWS_EC2_METADATA_DISABLED", "true")
        .envs(endpoint)
        .env("AWS_CONTAINER_CREDENTIALS_FULL_URI", format!("{url}/container"))
        .envs(env.iter().copied())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let signed = |request: &String| request.contains("Credential=FROM-CONTAINER");
    let used = requests.lock().unwrap().iter().any(signed);
    assert_eq!(used, output.status.success(), "{said}");
    (output.status.code(), said)
}

/// With nothing set wrongly the credentials are those of the container, also with an empty `AWS_PROFILE`.
#[test]
fn an_empty_profile_is_none() {
    for config in ["", "[default]\nregion = us-east-1\n"] {
        for profile in ["", "default"] {
            let (status, said) = list(config, &[("AWS_PROFILE", profile)]);
            assert_eq!(status, Some(0), "{config}{profile}: {said}");
        }
    }
}

/// "The SDK alone would go on with the credentials of the machine": so it does with a role whose source is the profile
/// itself, which has no keys.
#[test]
fn a_role_that_is_its_own_source_is_an_error() {
    let role = |name: &str, source: &str| {
        format!(
            "[{name}]\nrole_arn = arn:aws:iam::123456789012:role/a\nsource_profile = {source}\n"
        )
    };
    for (config, profile) in [
        (role("profile dev", "dev"), "dev"),
        (role("default", "default"), "default"),
        (role("profile dev", "base") + &role("profile base", "base"), "dev"),
        (role("profile dev", "base") + &role("profile base", "dev"), "dev"),
        (role("profile dev", "base") + &role("profile base", "dev") + "[default]\n", "dev"),
    ] {
        let (status, said) = list(&config, &[("AWS_PROFILE", profile)]);
        assert_eq!(status, Some(1), "{config} uses the credentials of the container. {said}");
        assert!(said.contains(&format!("AWS profile {profile}")), "{config}{said}");
    }
}

/// "the error names that one": also where the chain of roles leads in a circle, however many profiles there are.
#[test]
fn a_circle_of_source_profiles_is_named() {
    let circle = "[profile dev]\nrole_arn = arn:aws:iam::123456789012:role/a\nsource_profile = base\n\
                  [profile base]\nrole_arn = arn:aws:iam::123456789012:role/a\nsource_profile = dev\n";
    for others in ["", "[default]\n", "[default]\n[profile other]\n"] {
        let web_identity = [
            ("AWS_WEB_IDENTITY_TOKEN_FILE", "/x"),
            ("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/b"),
        ];
        let env = [&[("AWS_PROFILE", "dev")][..], &web_identity].concat();
        let (status, said) = list(&format!("{circle}{others}"), &env);
        assert_eq!(status, Some(1), "{others}{said}");
        assert!(said.contains("in a circle back to dev"), "{others}{said}");
        assert!(!said.contains("TOKEN_FILE"), "{others}{said}");
    }
}

/// The SDK panics on an empty endpoint; the AWS CLI takes it as unset.
#[test]
fn an_empty_endpoint_in_a_profile_is_none() {
    let config = "[profile dev]\nendpoint_url = {url}\nservices = s\n[services s]\ncloudformation =\n  endpoint_url =\n";
    let (status, said) = list(config, &[("AWS_PROFILE", "dev")]);
    assert_eq!(status, Some(0), "{said}");
}

//! Every source of AWS credentials that this machine can play: the program runs with a folder of its own as home, and
//! one listener plays AWS. The calls that arrive there are signed with the credentials of the source.
#![cfg(unix)]

use std::io::Write as _;
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

use crate::aws::read_request;

/// What no message may show.
const SECRET: &str = "hunter2";

/// One address for all services of AWS, a container and a machine. It keeps the requests.
struct Aws {
    url: String,
    requests: Arc<Mutex<Vec<String>>>,
}

impl Aws {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let requests: Arc<Mutex<Vec<String>>> = Arc::default();
        let kept = Arc::clone(&requests);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let kept = Arc::clone(&kept);
                std::thread::spawn(move || serve(stream.unwrap(), &kept));
            }
        });
        Self { url, requests }
    }

    /// The access keys that signed the calls to CloudFormation.
    fn keys(&self) -> Vec<String> {
        let requests = self.requests.lock().unwrap();
        let calls = requests.iter().filter(|request| request.contains("Action=DescribeStacks"));
        let key = |request: &String| {
            let (_, rest) = request.split_once("Credential=").unwrap();
            rest.split('/').next().unwrap().to_owned()
        };
        calls.map(key).collect()
    }
}

fn serve(mut stream: TcpStream, kept: &Mutex<Vec<String>>) {
    while let Some(request) = read_request(&mut stream) {
        let (status, head, body) = answer(&request);
        kept.lock().unwrap().push(request);
        let length = body.len();
        let all = format!("HTTP/1.1 {status}\r\n{head}content-length: {length}\r\n\r\n{body}");
        let _ = stream.write_all(all.as_bytes());
    }
}

/// Credentials as a container and a machine return them.
fn of_machine(key: &str) -> String {
    format!(
        r#"{{"Code": "Success", "Type": "AWS-HMAC", "AccessKeyId": "{key}", "SecretAccessKey": "{SECRET}",
        "Token": "{SECRET}", "AccountId": "123456789012", "Expiration": "2099-01-01T00:00:00Z",
        "LastUpdated": "2020-01-01T00:00:00Z"}}"#
    )
}

/// Credentials as STS returns them.
fn of_sts(action: &str, key: &str) -> String {
    format!(
        "<{action}Response><{action}Result><Credentials><AccessKeyId>{key}</AccessKeyId>\
         <SecretAccessKey>{SECRET}</SecretAccessKey><SessionToken>{SECRET}</SessionToken>\
         <Expiration>2099-01-01T00:00:00Z</Expiration></Credentials></{action}Result></{action}Response>"
    )
}

fn answer(request: &str) -> (&'static str, &'static str, String) {
    let mut words = request.split(' ');
    let (method, path) = (words.next().unwrap(), words.next().unwrap());
    let path = path.split('?').next().unwrap();
    let has = |text: &str| request.contains(text);
    match (method, path) {
        ("GET", "/federation/credentials") if has("sso_bearer_token: valid-token") => {
            let credentials = format!(
                r#"{{"roleCredentials": {{"accessKeyId": "FROM-SSO", "secretAccessKey": "{SECRET}",
                "sessionToken": "{SECRET}", "expiration": 4070908800000}}}}"#
            );
            ("200 OK", "", credentials)
        }
        ("GET", "/federation/credentials") => (
            "401 Unauthorized",
            "x-amzn-errortype: UnauthorizedException\r\n",
            r#"{"message": "Session token not found or invalid"}"#.to_owned(),
        ),
        ("POST", "/token") => {
            ("200 OK", "", r#"{"accessToken": "valid-token", "expiresIn": 3600}"#.to_owned())
        }
        ("GET", "/container") => ("200 OK", "", of_machine("FROM-CONTAINER")),
        ("GET", "/broken") => ("500 Internal Server Error", "", SECRET.to_owned()),
        ("PUT", "/latest/api/token") => {
            ("200 OK", "x-aws-ec2-metadata-token-ttl-seconds: 21600\r\n", "token".to_owned())
        }
        ("GET", path) if path.starts_with("/latest/meta-data/iam/security-credentials-extended") => {
            ("404 Not Found", "", String::new())
        }
        ("GET", "/latest/meta-data/iam/security-credentials/") => {
            ("200 OK", "", "role".to_owned())
        }
        ("GET", "/latest/meta-data/iam/security-credentials/role") => {
            ("200 OK", "", of_machine("FROM-MACHINE"))
        }
        _ if has("Action=AssumeRoleWithWebIdentity") => {
            ("200 OK", "", of_sts("AssumeRoleWithWebIdentity", "FROM-WEB-IDENTITY"))
        }
        _ if has("Action=AssumeRole") && has("forbidden") => (
            "403 Forbidden",
            "",
            "<ErrorResponse><Error><Code>AccessDenied</Code><Message>not yours</Message></Error></ErrorResponse>"
                .to_owned(),
        ),
        _ if has("Action=AssumeRole") => ("200 OK", "", of_sts("AssumeRole", "FROM-ROLE")),
        _ if has("Action=DescribeStacks") => (
            "200 OK",
            "",
            "<DescribeStacksResponse><DescribeStacksResult><Stacks/></DescribeStacksResult></DescribeStacksResponse>"
                .to_owned(),
        ),
        _ => ("404 Not Found", "", String::new()),
    }
}

/// A home folder, and the program in it.
struct Home {
    folder: tempfile::TempDir,
    aws: Aws,
    env: Vec<(String, String)>,
}

/// The outcome of a run.
struct Ran {
    status: Option<i32>,
    stderr: String,
}

impl Ran {
    #[track_caller]
    fn says(&self, status: i32, text: &str) {
        assert!(self.stderr.contains(text), "{text:?} is not in {}", self.stderr);
        assert_eq!(self.status, Some(status), "{}", self.stderr);
        assert!(!self.stderr.contains(SECRET), "{}", self.stderr);
        assert!(!self.stderr.contains(" { "), "{}", self.stderr);
    }
}

impl Home {
    /// A home with these profiles.
    fn new(config: &str) -> Self {
        let (folder, aws) = (tempfile::tempdir().unwrap(), Aws::start());
        let mut home = Self { folder, aws, env: Vec::new() };
        home.write(".aws/config", config);
        for service in ["CLOUDFORMATION", "STS", "SSO", "SSO_OIDC", "SIGNIN"] {
            let url = home.aws.url.clone();
            home = home.env(&format!("AWS_ENDPOINT_URL_{service}"), &url);
        }
        home.env("AWS_EC2_METADATA_DISABLED", "true")
    }

    fn env(mut self, name: &str, value: &str) -> Self {
        self.env.retain(|(known, _)| known != name);
        self.env.push((name.to_owned(), value.to_owned()));
        self
    }

    fn profile(self, name: &str) -> Self {
        self.env("AWS_PROFILE", name)
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    fn write(&self, name: &str, text: &str) {
        let path = self.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    /// Runs a command in us-east-1. Its standard input ends after it.
    fn run(&self, line: &str) -> Ran {
        let mut child = Command::new(env!("CARGO_BIN_EXE_zae-limiter"))
            .args(line.split(' '))
            .env_clear()
            .env("HOME", self.path())
            .env("PATH", "/usr/bin:/bin")
            .env("AWS_REGION", "us-east-1")
            .env("ZAEL_AWS_TIMEOUT", "5s")
            .envs(self.env.iter().cloned())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let stdin = child.stdin.take();
        let output = child.wait_with_output().unwrap();
        drop(stdin);
        Ran { status: output.status.code(), stderr: String::from_utf8(output.stderr).unwrap() }
    }

    /// The access key of the calls that `list` makes.
    #[track_caller]
    fn key(&self) -> String {
        let ran = self.run("list");
        assert_eq!(ran.status, Some(0), "{}", ran.stderr);
        assert!(!ran.stderr.contains(SECRET), "{}", ran.stderr);
        let keys = self.aws.keys();
        assert!(!keys.is_empty());
        keys.last().unwrap().clone()
    }
}

/// The settings of a profile with a process.
fn process(command: &str) -> Home {
    Home::new(&format!("[profile dev]\ncredential_process = {command}\n")).profile("dev")
}

#[test]
fn credentials_of_a_process() {
    let home = process("echo >> \"$HOME/runs\"; cat \"$HOME/credentials.json\"");
    let credentials = format!(
        r#"{{"Version": 1, "AccessKeyId": "FROM-PROCESS", "SecretAccessKey": "{SECRET}"}}"#
    );
    home.write("credentials.json", &credentials);
    assert_eq!(home.key(), "FROM-PROCESS");
    // It may ask a person for a code.
    assert_eq!(std::fs::read_to_string(home.path().join("runs")).unwrap(), "\n");
}

#[test]
fn a_process_that_fails_is_named_by_its_profile() {
    let print = format!("echo {SECRET}; echo {SECRET} >&2");
    let half = r#"printf '{"Version": 1, "AccessKeyId": "x", "SecretAccessKey": "hunter2"'"#;
    let nonsense = "printed no credentials in the JSON that AWS documents; run its command by hand";
    for (command, says) in [
        (&*format!("{print}; exit 3"), "failed (exit status: 3); run its command by hand"),
        ("/no/such/program", "failed (exit status: 127); run its command by hand"),
        (&*format!("{print}; true"), nonsense),
        ("printf '\\377\\376hunter2'", nonsense),
        (half, nonsense),
        ("true", nonsense),
    ] {
        let home = process(command);
        let says = format!("the credential_process of AWS profile dev {says}");
        let store = format!("dynamodb:my-app?region=us-east-1&endpoint={}", home.aws.url);
        for line in [
            "list".to_owned(),
            "aggregate --once -n my-app".to_owned(),
            format!("acquire key-1 gpt-4 -c rpm:1 --store {store}"),
            format!("namespace list --store {store}"),
        ] {
            home.run(&line).says(1, &says);
        }
        assert!(home.aws.keys().is_empty());
    }
}

#[test]
fn a_process_that_hangs_ends_no_later_than_the_limit_of_a_call() {
    // It reads what nobody writes.
    let home = process("cat").env("ZAEL_AWS_TIMEOUT", "300ms");
    for line in ["list", "deploy -n my-app --no-aggregator", "aggregate --once -n my-app"] {
        let says =
            "the source of the AWS credentials did not answer within 300 ms (AWS profile dev)";
        home.run(line).says(3, says);
    }
    let store = format!("dynamodb:my-app?region=us-east-1&endpoint={}", home.aws.url);
    let ran = home.run(&format!("namespace list --store {store}"));
    ran.says(3, "did not answer in time (AWS profile dev)");
}

/// A token as `aws sso login` stores it.
fn sso_token(token: &str, expires: &str, rest: &str) -> String {
    format!(r#"{{"accessToken": "{token}", "expiresAt": "{expires}"{rest}}}"#)
}

/// With the names of the files that `aws sso login` writes: SHA-1 of the session or of the URL.
const SSO_SESSION: (&str, &str) = (
    "[profile dev]\nsso_session = my-sso\nsso_account_id = 123456789012\nsso_role_name = dev\n\
     [sso-session my-sso]\nsso_region = eu-west-1\nsso_start_url = https://example.awsapps.com/start\n",
    ".aws/sso/cache/0ad374308c5a4e22f723adf10145eafad7c4031c.json",
);
const SSO_LEGACY: (&str, &str) = (
    "[profile dev]\nsso_start_url = https://example.awsapps.com/start\nsso_region = eu-west-1\n\
     sso_account_id = 123456789012\nsso_role_name = dev\n",
    ".aws/sso/cache/e8be5486177c5b5392bd9aa76563515b29358e6e.json",
);
const LATER: &str = "2099-01-01T00:00:00Z";
const EARLIER: &str = "2020-01-01T00:00:00Z";
const SSO_LOGIN: &str = "the single sign-on of AWS profile dev is missing or has ended; run aws sso login --profile dev";

#[test]
fn credentials_of_a_single_sign_on() {
    for (config, file) in [SSO_SESSION, SSO_LEGACY] {
        let home = Home::new(config).profile("dev");
        home.write(file, &sso_token("valid-token", LATER, ""));
        assert_eq!(home.key(), "FROM-SSO", "{config}");
    }
}

#[test]
fn a_single_sign_on_that_has_ended_says_how_to_log_in() {
    for (config, file) in [SSO_SESSION, SSO_LEGACY] {
        let home = Home::new(config).profile("dev");
        home.run("list").says(1, SSO_LOGIN);
        // By its time, by the word of the portal, and by its contents.
        for token in [
            sso_token(SECRET, EARLIER, ""),
            sso_token(SECRET, LATER, ""),
            sso_token(SECRET, "soon", ""),
            SECRET.to_owned(),
        ] {
            home.write(file, &token);
            home.run("list").says(1, SSO_LOGIN);
            home.run("aggregate --once -n my-app").says(1, SSO_LOGIN);
        }
        assert!(home.aws.keys().is_empty());
    }
}

#[test]
fn an_old_single_sign_on_is_refreshed() {
    let (config, file) = SSO_SESSION;
    let home = Home::new(config).profile("dev");
    let refresh = format!(
        r#", "clientId": "x", "clientSecret": "{SECRET}", "refreshToken": "{SECRET}",
        "registrationExpiresAt": "{LATER}", "region": "eu-west-1", "startUrl": "https://example.awsapps.com/start""#
    );
    home.write(file, &sso_token(SECRET, EARLIER, &refresh));
    assert_eq!(home.key(), "FROM-SSO");
}

/// The key is that of an example in the documentation of AWS.
fn login(expires: &str) -> String {
    let key = "-----BEGIN EC PRIVATE KEY-----\\nMHcCAQEEIFDZHUzOG1Pzq+6F0mjMlOSp1syN9LRPBuHMoCFXTcXhoAoGCCqGSM49\\nAwEHoUQDQgAE9qhj+KtcdHj1kVgwxWWWw++tqoh7H7UHs7oXh8jBbgF47rrYGC+t\\ndjiIaHK3dBvvdE7MGj5HsepzLm3Kj91bqA==\\n-----END EC PRIVATE KEY-----\\n";
    format!(
        r#"{{"accessToken": {{"accessKeyId": "FROM-LOGIN", "secretAccessKey": "{SECRET}",
        "sessionToken": "{SECRET}", "accountId": "123456789012", "expiresAt": "{expires}"}},
        "tokenType": "aws_sigv4", "refreshToken": "{SECRET}", "idToken": "x",
        "clientId": "arn:aws:signin:::devtools/same-device", "dpopKey": "{key}"}}"#
    )
}

#[test]
fn credentials_of_a_login() {
    let config = "[profile dev]\nlogin_session = arn:aws:iam::123456789012:user/dev\n";
    let home = Home::new(config).profile("dev");
    let says = "AWS profile dev is not logged in; run aws login --profile dev";
    home.run("list").says(1, says);
    // Named by the SHA-256 of the session.
    let file =
        ".aws/login/cache/893f13863f68a08133e541260597f1d60f5bf9b326625782990032cbad201e26.json";
    for token in [login(EARLIER), SECRET.to_owned()] {
        home.write(file, &token);
        home.run("list").says(1, says);
    }
    home.write(file, &login(LATER));
    assert_eq!(home.key(), "FROM-LOGIN");
}

#[test]
fn credentials_of_a_role_with_a_source_profile() {
    let config = |role: &str| {
        format!(
            "[profile dev]\nrole_arn = arn:aws:iam::123456789012:role/{role}\nsource_profile = base\n\
             [profile base]\naws_access_key_id = BASE\naws_secret_access_key = {SECRET}\n"
        )
    };
    let home = Home::new(&config("mine")).profile("dev");
    assert_eq!(home.key(), "FROM-ROLE");
    let home = Home::new(&config("forbidden")).profile("dev");
    let says = "the AWS credentials could not be loaded (AWS profile dev); correct their source";
    home.run("list").says(1, says);
    let home = home.env("AWS_ENDPOINT_URL_STS", &crate::aws::closed_port());
    home.run("list")
        .says(3, "the source of the AWS credentials cannot be reached (AWS profile dev)");
}

#[test]
fn credentials_of_a_web_identity() {
    let home = Home::new("");
    home.write("token", "a web token");
    let token = home.path().join("token").to_str().unwrap().to_owned();
    let home = home
        .env("AWS_WEB_IDENTITY_TOKEN_FILE", &token)
        .env("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/mine");
    assert_eq!(home.key(), "FROM-WEB-IDENTITY");
    let home = home.env("AWS_WEB_IDENTITY_TOKEN_FILE", "/no/such/file");
    home.run("list").says(1, "the AWS credentials could not be loaded");
}

#[test]
fn credentials_of_a_container() {
    let home = Home::new("");
    let (found, broken) =
        (format!("{}/container", home.aws.url), format!("{}/broken", home.aws.url));
    let home = home.env("AWS_CONTAINER_CREDENTIALS_FULL_URI", &found);
    assert_eq!(home.key(), "FROM-CONTAINER");
    let home = home.env("AWS_CONTAINER_CREDENTIALS_FULL_URI", &broken);
    home.run("list").says(1, "the AWS credentials could not be loaded");
}

#[test]
fn credentials_of_a_machine() {
    let home = Home::new("");
    let url = home.aws.url.clone();
    let home = home
        .env("AWS_EC2_METADATA_DISABLED", "false")
        .env("AWS_EC2_METADATA_SERVICE_ENDPOINT", &url);
    assert_eq!(home.key(), "FROM-MACHINE");
}

#[test]
fn credentials_in_variables_need_no_profile() {
    let home = Home::new("").profile("missing").env("AWS_ACCESS_KEY_ID", "FROM-VARIABLES");
    assert_eq!(home.env("AWS_SECRET_ACCESS_KEY", SECRET).key(), "FROM-VARIABLES");
}

#[test]
fn a_missing_profile_is_named() {
    // The credentials of the machine are not those of the profile.
    let home = Home::new("[profile dev]\nregion = us-east-1\n").profile("misspelt");
    let url = home.aws.url.clone();
    let home = home
        .env("AWS_EC2_METADATA_DISABLED", "false")
        .env("AWS_EC2_METADATA_SERVICE_ENDPOINT", &url);
    let store = format!("dynamodb:my-app?region=us-east-1&endpoint={url}");
    for region in ["us-east-1", ""] {
        let home =
            Home { folder: tempfile::tempdir().unwrap(), aws: Aws::start(), env: home.env.clone() };
        let home = home.env("AWS_REGION", region);
        for line in [
            "list",
            "aggregate --once -n my-app",
            "namespace list -n my-app",
            &format!("namespace list --store {store}"),
        ] {
            let says = "there is no AWS profile misspelt; check AWS_PROFILE, or create the profile";
            home.run(line).says(1, says);
        }
    }
}

#[test]
fn no_credentials_at_all() {
    for config in ["", "[default]\nregion = us-east-1\n"] {
        let home = Home::new(config);
        for line in ["list", "aggregate --once -n my-app"] {
            home.run(line).says(1, "there are no usable AWS credentials; set AWS_PROFILE");
        }
    }
}

#[test]
fn a_profile_that_is_not_valid_is_named() {
    for config in [
        "[profile dev]\nrole_arn = arn:aws:iam::123456789012:role/mine\nsource_profile = dev2\n",
        "[profile dev]\nsso_session = missing\nsso_account_id = 1\nsso_role_name = x\n",
        "[profile dev\nregion = us-east-1\n",
    ] {
        let home = Home::new(config).profile("dev");
        let ran = home.run("list");
        assert!(ran.stderr.contains("AWS profile dev"), "{config}: {}", ran.stderr);
        assert_eq!(ran.status, Some(1), "{config}: {}", ran.stderr);
    }
}

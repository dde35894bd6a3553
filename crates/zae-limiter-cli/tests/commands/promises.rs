use serde_json::Value;

use crate::session::Session;

impl Session {
    fn seen(&mut self, line: &str) -> (u8, String, String) {
        self.run_unseen(line, usize::MAX)
    }

    fn json(&mut self, line: &str) -> Value {
        let (status, stdout, stderr) = self.seen(&format!("{line} -o json"));
        assert_eq!(status, 0, "{line}: {stderr}");
        serde_json::from_str(&stdout).unwrap()
    }
}

fn names(limits: &Value) -> Vec<&str> {
    limits.as_array().unwrap().iter().map(|limit| limit["name"].as_str().unwrap()).collect()
}

#[test]
fn limits_of_an_entity_on_all_resources_name_the_system_defaults_that_no_longer_hold() {
    let mut session = Session::new();
    session.seen("system set-defaults -l rpm:60 -l tpm:5000");
    let (_, _, stderr) = session.seen("entity set-limits key-1 -l rpm:10");
    assert!(stderr.contains("warning: tpm:5000/min no longer holds for key-1"), "{stderr}");
    let set = session.json("entity set-limits key-2 -l rpm:10");
    assert_eq!(names(&set["dropped"]), ["tpm"]);
}

#[test]
fn limits_of_an_entity_on_all_resources_name_the_resource_defaults_that_no_longer_hold() {
    let mut session = Session::new();
    session.seen("resource set-defaults gpt-4 -l rpm:60 -l tpm:5000");
    let (_, _, stderr) = session.seen("entity set-limits key-1 -l rpm:10");
    assert!(stderr.contains("tpm:5000/min") && stderr.contains("gpt-4"), "{stderr}");
}

/// Defaults that did not hold for the entity before are not dropped.
#[test]
fn limits_of_an_entity_on_all_resources_drop_only_defaults_that_held() {
    let mut session = Session::new();
    session.seen("system set-defaults -l rpm:60 -l tpm:5000");
    session.seen("resource set-defaults gpt-4 -l rpm:60 -l images:5");
    session.seen("resource set-defaults gpt-5 -l rpm:60");
    session.seen("resource set-defaults o1 -l rpm:60 -l thoughts:5");
    session.seen("entity set-limits key-1 -r o1 -l rpm:1");
    let set = session.json("entity set-limits key-1 -l rpm:10");
    let dropped: Vec<[&Value; 3]> = set["dropped"]
        .as_array()
        .unwrap()
        .iter()
        .map(|limit| [&limit["name"], &limit["level"], &limit["resource"]])
        .collect();
    let wanted = serde_json::json!([["tpm", "system", null], ["images", "resource", "gpt-4"]]);
    assert_eq!(serde_json::json!(dropped), wanted);
    // Now the limits of the entity hold, and nothing above them.
    let (_, _, stderr) = session.seen("entity set-limits key-1 -l rpm:20");
    assert!(!stderr.contains("no longer"), "{stderr}");
    let (_, _, stderr) = session.seen("entity set-limits key-2 -r gpt-4 -l rpm:1 -l images:1");
    assert!(!stderr.contains("no longer"), "{stderr}");
    let (_, _, stderr) = session.seen("entity set-limits key-2 -l rpm:1 -l tpm:1");
    assert!(stderr.contains("thoughts:5/min no longer holds for key-2 on o1"), "{stderr}");
    assert!(!stderr.contains("gpt-4") && !stderr.contains("system"), "{stderr}");
}

#[test]
fn limits_of_an_entity_on_all_resources_are_confirmed_on_a_terminal_if_defaults_end() {
    let mut session = Session::new().on_a_terminal("n\n");
    session.seen("system set-defaults -l rpm:60 -l tpm:5000");
    let (status, ..) = session.seen("entity set-limits key-1 -l rpm:10");
    assert_eq!(status, 1);
    assert_eq!(session.seen("entity get-limits key-1").0, 4);
}

#[test]
fn no_hint_drops_the_defaults_of_the_system() {
    let lines =
        ["resource get-defaults gpt-4", "resource delete-defaults gpt-4 -y", "resource list"];
    let mut session = Session::new();
    for line in lines {
        let (_, _, stderr) = session.seen(line);
        assert!(stderr.contains("zae-limiter resource set-defaults"), "{line}: {stderr}");
    }
    // A policy hides nothing.
    session.seen("system set-defaults --on-unavailable allow");
    for line in lines {
        let (_, _, stderr) = session.seen(line);
        assert!(stderr.contains("zae-limiter resource set-defaults"), "{line}: {stderr}");
    }
    session.seen("system set-defaults -l rpm:60 -l tpm:5000");
    for line in lines {
        let (_, _, stderr) = session.seen(line);
        assert!(!stderr.contains("resource set-defaults"), "{line}: {stderr}");
        assert!(stderr.contains("the system's defaults apply"), "{line}: {stderr}");
    }
}

#[test]
fn capacity_counts_tokens_below_an_ancestor_without_a_balance() {
    let mut session = Session::new();
    session.seen("resource set-defaults api -l rpm:60");
    session.seen("entity create project");
    session.seen("entity create key-1 --parent project --cascade");
    session.seen("acquire key-1 api -c rpm:10");
    let within = |capacity: &Value, at: usize| capacity["entities"][at]["within"].clone();
    let capacity = session.json("resource capacity api rpm");
    assert_eq!(within(&capacity, 0), "project", "{capacity}");
    assert_eq!(capacity["total_available"], 50, "{capacity}");
    session.seen("entity delete project -y");
    let capacity = session.json("resource capacity api rpm");
    assert_eq!(capacity["entities"].as_array().unwrap().len(), 1, "{capacity}");
    assert_eq!(within(&capacity, 0), Value::Null, "{capacity}");
    assert_eq!(capacity["total_available"], 50, "{capacity}");
    assert_eq!(capacity["total_capacity"], 60, "{capacity}");
}

#[test]
fn a_look_further_back_is_further_back() {
    let mut session = Session::new();
    for (window, default) in [("hourly", "24h"), ("daily", "30d"), ("monthly", "365d")] {
        let line = format!("usage list -e key-1 -w {window}");
        let (_, _, stderr) = session.seen(&line);
        let (_, further) = stderr.trim_end().split_once("further back: --start ").unwrap();
        let (_, _, without) = session.seen(&format!("{line} --start {default}"));
        let (_, _, with) = session.seen(&format!("{line} --start {further}"));
        assert!(stderr.starts_with(without.trim_end()), "{stderr}{without}");
        let start = |text: &str| text.split_once(" from ").unwrap().1[..10].to_owned();
        assert!(start(&with) < start(&stderr), "{window}: {with}{stderr}");
    }
}

/// A session with credentials for an endpoint.
fn session_with_credentials() -> Session {
    let mut session = Session::new();
    for (name, value) in
        [("AWS_REGION", "us-east-1"), ("AWS_ACCESS_KEY_ID", "x"), ("AWS_SECRET_ACCESS_KEY", "y")]
    {
        session.env.insert(name.to_owned(), value.to_owned());
    }
    session
}

#[test]
fn hints_keep_the_options_that_select_the_store() {
    let mut session = session_with_credentials();
    let url = endpoint(|_| (200, "{}"));
    let (_, _, stderr) =
        session.seen(&format!("usage list -e key-1 -n my-app --endpoint-url {url}"));
    let command = format!("zae-limiter -n my-app --endpoint-url {url} aggregate --once");
    assert!(stderr.contains(&command), "{stderr}");

    let url = endpoint(|request| match is_for_tables(request) {
        true => (400, NO_TABLE),
        false => (400, NO_STACK),
    });
    let (status, _, stderr) = session.seen(&format!("status -n nope --endpoint-url {url}"));
    assert_eq!(status, 4, "{stderr}");
    let command = format!("hint: zae-limiter --endpoint-url {url} list shows");
    assert!(stderr.contains(&command), "{stderr}");
    let (_, _, stderr) = session.seen(&format!("check -n nope --endpoint-url {url}"));
    let command = format!("hint: zae-limiter -n nope --endpoint-url {url} deploy creates one");
    assert!(stderr.contains(&command), "{stderr}");
}

#[test]
fn no_hint_needs_a_service_that_the_endpoint_lacks() {
    let mut session = session_with_credentials();
    let url = endpoint(|request| match is_for_tables(request) {
        true => (400, NO_TABLE),
        false => (400, "{}"),
    });
    for command in ["status", "check", "upgrade"] {
        let (status, _, stderr) = session.seen(&format!("{command} -n nope --endpoint-url {url}"));
        assert_eq!(status, 4, "{stderr}");
        let (_, hint) = stderr.split_once("hint:").unwrap();
        assert!(hint.contains("zae-limiter local up --name nope"), "{command}: {stderr}");
        assert!(!hint.contains(" deploy") && !hint.contains(" list"), "{command}: {stderr}");
    }
    let url = endpoint(|_| (404, "nothing here"));
    for command in ["status", "check", "upgrade"] {
        let (_, _, stderr) = session.seen(&format!("{command} -n nope --endpoint-url {url}"));
        assert!(stderr.contains("check the endpoint"), "{command}: {stderr}");
        assert!(!stderr.contains("zae-limiter"), "{command}: {stderr}");
    }
}

const NO_TABLE: &str =
    r#"{"__type":"com.amazonaws.dynamodb.v20120810#ResourceNotFoundException","message":"none"}"#;
const NO_STACK: &str = "<ErrorResponse><Error><Code>ValidationError</Code>\
                        <Message>Stack with id nope does not exist</Message></Error></ErrorResponse>";

fn is_for_tables(request: &str) -> bool {
    request.to_ascii_lowercase().contains("x-amz-target: dynamodb_")
}

/// An endpoint that answers every request with a status and a body.
fn endpoint(answer: fn(&str) -> (u16, &'static str)) -> String {
    use std::io::{Read as _, Write as _};
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            std::thread::spawn(move || {
                let (mut stream, mut request) = (stream.unwrap(), String::new());
                let mut read = [0; 65_536];
                while let Ok(length @ 1..) = stream.read(&mut read) {
                    request.push_str(&String::from_utf8_lossy(&read[..length]));
                    if !is_whole(&request) {
                        continue;
                    }
                    let (status, body) = answer(&std::mem::take(&mut request));
                    let length = body.len();
                    let head = format!("HTTP/1.1 {status} X\r\ncontent-length: {length}\r\n\r\n");
                    let _ = stream.write_all(format!("{head}{body}").as_bytes());
                }
            });
        }
    });
    url
}

/// Whether a request has arrived with its body.
fn is_whole(request: &str) -> bool {
    let Some((head, body)) = request.split_once("\r\n\r\n") else { return false };
    let head = head.to_ascii_lowercase();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    body.len() >= length.map_or(0, |length| length.parse().unwrap())
}

#[tokio::test]
async fn the_cache_counts_one_hit_or_miss_for_each_level_of_a_call() {
    let session = Session::new();
    let limiter = session.limiter().await;
    limiter
        .ensure_resource_defaults("api", [zae_limiter::Limit::per_day("rpm", 60)])
        .await
        .unwrap();
    limiter.ensure_entity("project").await.unwrap();
    limiter.ensure_entity("key-1").parent("project").cascade().await.unwrap();
    limiter.invalidate_cache();
    let before = limiter.cache_stats();
    limiter.acquire("key-1", "api").take("rpm", 1).await.unwrap().commit().await.unwrap();
    let cold = limiter.cache_stats();
    limiter.acquire("key-1", "api").take("rpm", 1).await.unwrap().commit().await.unwrap();
    let warm = limiter.cache_stats();
    assert_eq!((cold.hits - before.hits, cold.misses - before.misses), (0, 2));
    assert_eq!((warm.hits - cold.hits, warm.misses - cold.misses), (2, 0));
}

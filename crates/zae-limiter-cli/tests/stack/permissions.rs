//! The stack's policies, enforced: every call of the program is checked by the emulator, partition keys
//! included.

use serde_json::Value;

use crate::aws::{ROOT, Ran, Server};

/// A principal with one of the stack's policies.
pub(crate) struct Principal<'a> {
    server: &'a Server,
    keys: (String, String),
}

impl<'a> Principal<'a> {
    pub(crate) fn new(server: &'a Server, policy: &str, namespace: Option<&str>) -> Self {
        let tags = namespace.map_or("[]".to_owned(), |id| {
            format!("[{{'Key': 'zael_namespace_id', 'Value': '{id}'}}]")
        });
        let name = format!("{policy}-{}", namespace.unwrap_or("untagged"));
        let line = format!(
            "iam = make('iam')\n\
             iam.create_user(UserName='{name}', Tags={tags})\n\
             iam.attach_user_policy(UserName='{name}', PolicyArn='arn:aws:iam::123456789012:policy/app-{policy}')\n\
             key = iam.create_access_key(UserName='{name}')['AccessKey']\n\
             print(json.dumps([key['AccessKeyId'], key['SecretAccessKey']]))"
        );
        let keys: Value = serde_json::from_str(&server.python(&line)).unwrap();
        let text = |at: usize| keys[at].as_str().unwrap().to_owned();
        Self { server, keys: (text(0), text(1)) }
    }

    /// Its access key.
    pub(crate) fn keys(&self) -> &(String, String) {
        &self.keys
    }

    fn run(&self, words: &str) -> Ran {
        self.server.run((&self.keys.0, &self.keys.1), &format!("{words} --name app"))
    }

    #[track_caller]
    fn may(&self, words: &str) {
        let ran = self.run(words);
        assert_eq!(ran.code, 0, "{words}: {}", ran.err);
    }

    #[track_caller]
    fn may_not(&self, words: &str) {
        let ran = self.run(words);
        assert_eq!(ran.code, 1, "{words}: {}{}", ran.out, ran.err);
        assert!(ran.err.contains("no permission on table app"), "{words}: {}", ran.err);
    }
}

/// Acquires: with stored limits and its own, waiting, settled, with ancestors, refused.
const ACQUIRES: [&str; 6] = [
    "acquire key-1 gpt-4 -c rpm:1",
    "acquire key-1 gpt-4 -c rpm:1 --adjust rpm:3",
    "acquire child gpt-4 -c rpm:2",
    "acquire free other-resource -c rpm:1 -l rpm:5",
    "available key-1 gpt-4",
    "available child gpt-4",
];

/// Commands that change anything but buckets.
const CHANGES: [&str; 7] = [
    "resource set-defaults gpt-4 -l rpm:99",
    "resource delete-defaults gpt-4 --yes",
    "system set-defaults -l rpm:1",
    "entity create new",
    "entity set-limits key-1 -r gpt-4 -l rpm:99",
    "entity delete child --yes",
    "namespace register mine",
];

const READS: [&str; 5] = [
    "available key-1 gpt-4",
    "entity show child",
    "entity children parent",
    "resource get-defaults gpt-4",
    "audit list -e child",
];

#[test]
fn policies_are_enough_and_no_more() {
    let server = Server::with_iam();
    let root = |words: &str| {
        let ran = server.run(ROOT, &format!("{words} --name app"));
        assert_eq!(ran.code, 0, "{words}: {}", ran.err);
        ran
    };
    root("deploy --no-aggregator --no-alarms");
    // A day: on a busy machine a minute's limit would be full again before the call that is refused.
    root("resource set-defaults gpt-4 -l rpm:100/day");
    root("entity create parent");
    root("entity create child --parent parent --cascade");
    root("namespace register other");
    root("-N other resource set-defaults gpt-4 -l rpm:100");
    let shown = root("namespace show default -o json").json();
    let id = shown["namespace_id"].as_str().unwrap();

    let acquire = Principal::new(&server, "acq", None);
    ACQUIRES.iter().for_each(|words| acquire.may(words));
    CHANGES.iter().for_each(|words| acquire.may_not(words));
    assert_eq!(acquire.run("acquire key-1 gpt-4 -c rpm:100").code, 5, "refused, not denied");

    let read = Principal::new(&server, "read", None);
    READS.iter().for_each(|words| read.may(words));
    CHANGES.iter().for_each(|words| read.may_not(words));
    read.may_not("acquire key-1 gpt-4 -c rpm:1");

    let tenant = Principal::new(&server, "ns-acq", Some(id));
    ACQUIRES.iter().for_each(|words| tenant.may(words));
    CHANGES.iter().for_each(|words| tenant.may_not(words));
    tenant.may_not("-N other acquire key-1 gpt-4 -c rpm:1");
    tenant.may_not("-N other available key-1 gpt-4");

    let reader = Principal::new(&server, "ns-read", Some(id));
    READS.iter().for_each(|words| reader.may(words));
    CHANGES.iter().for_each(|words| reader.may_not(words));
    READS[1..].iter().for_each(|words| reader.may_not(&format!("-N other {words}")));

    let untagged = Principal::new(&server, "ns-full", None);
    untagged.may_not("available key-1 gpt-4");
    let admin = Principal::new(&server, "ns-full", Some(id));
    CHANGES[..6].iter().for_each(|words| admin.may(words));
    admin.may_not("namespace register mine");
    CHANGES[..5].iter().for_each(|words| admin.may_not(&format!("-N other {words}")));

    let full = Principal::new(&server, "full", None);
    full.may("entity create another");
    full.may("namespace register third");
    full.may("-N other entity create another");
}

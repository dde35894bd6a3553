//! The environment variables that the program reads, each declared once.

/// An environment variable.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Var {
    pub name: &'static str,
    /// For the reference.
    pub meaning: &'static str,
}

/// The address of the store without `--store`.
pub(crate) const STORE: Var =
    Var { name: "ZAEL_STORE", meaning: "the address of the store, unless --store is given" };

/// The namespace without `--namespace`.
pub(crate) const NAMESPACE: Var =
    Var { name: "ZAEL_NAMESPACE", meaning: "the namespace, unless --namespace is given" };

/// The principal of audit events.
pub(crate) const PRINCIPAL: Var =
    Var { name: "ZAEL_PRINCIPAL", meaning: "the principal that audit events name (default: USER)" };

/// The principal without `ZAEL_PRINCIPAL`.
pub(crate) const USER: Var =
    Var { name: "USER", meaning: "the principal, unless ZAEL_PRINCIPAL is set" };

/// Any value switches colours off (no-color.org).
pub(crate) const NO_COLOR: Var =
    Var { name: "NO_COLOR", meaning: "any value switches colours off" };

/// The folders where `local` looks for its program.
pub(crate) const PATH: Var =
    Var { name: "PATH", meaning: "the folders where `local` looks for the endpoint's program" };

/// The program that `local` starts.
pub(crate) const LOCAL: Var = Var {
    name: "ZAEL_LOCAL",
    meaning: "the program that `local` starts, instead of the one in this program's folder or on PATH",
};

/// The time limit of a call to AWS.
pub(crate) const AWS_TIMEOUT: Var = Var {
    name: "ZAEL_AWS_TIMEOUT",
    meaning: "the time limit of each call to AWS by the commands about stacks (default: 10s)",
};

/// The AWS region, in the order in which the SDK looks.
pub(crate) const AWS_REGION: Var = Var {
    name: "AWS_REGION",
    meaning: "the AWS region, unless --region or the store's URL names it",
};
pub(crate) const AWS_DEFAULT_REGION: Var =
    Var { name: "AWS_DEFAULT_REGION", meaning: "the AWS region, unless AWS_REGION is set" };

/// The endpoint, in the order in which the SDK looks.
pub(crate) const AWS_ENDPOINT_URL_DYNAMODB: Var = Var {
    name: "AWS_ENDPOINT_URL_DYNAMODB",
    meaning: "the URL of DynamoDB, unless --endpoint-url or the store's URL names it",
};
pub(crate) const AWS_ENDPOINT_URL: Var = Var {
    name: "AWS_ENDPOINT_URL",
    meaning: "the URL of all AWS services, unless --endpoint-url or the store's URL names it",
};

/// The endpoints of single services, which come before that of all.
pub(crate) const AWS_ENDPOINT_URLS: [Var; 5] = [
    Var {
        name: "AWS_ENDPOINT_URL_DYNAMODB_STREAMS",
        meaning: "the URL of DynamoDB Streams, for `aggregate`",
    },
    Var {
        name: "AWS_ENDPOINT_URL_CLOUDFORMATION",
        meaning: "the URL of CloudFormation, for the commands about stacks",
    },
    Var { name: "AWS_ENDPOINT_URL_CLOUDWATCH", meaning: "the URL of CloudWatch, for `status`" },
    Var { name: "AWS_ENDPOINT_URL_S3", meaning: "the URL of S3, for archives and functions" },
    Var { name: "AWS_ENDPOINT_URL_SQS", meaning: "the URL of SQS, for `status`" },
];

/// All of them, for the reference.
pub(crate) fn all() -> impl Iterator<Item = Var> {
    let single = [
        STORE,
        NAMESPACE,
        PRINCIPAL,
        USER,
        NO_COLOR,
        PATH,
        LOCAL,
        AWS_TIMEOUT,
        AWS_REGION,
        AWS_DEFAULT_REGION,
        AWS_ENDPOINT_URL_DYNAMODB,
        AWS_ENDPOINT_URL,
    ];
    single.into_iter().chain(AWS_ENDPOINT_URLS)
}

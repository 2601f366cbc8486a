//! The table of routes for the matrix: the access that each needs, and values for the names in its path.
//!
//! [`EXPECTED`] is compared with the router's own table: a route that is missing here fails the test.

use prost::Message;
use prost_types::FileDescriptorSet;
use sapwood_proto::generated::{DESCRIPTORS, INFERENCE_DESCRIPTORS};
use sapwood_server::auth::scopes::{KeyScope, RouteAccess};
use sapwood_server::http::route::{Route, RouteKind};

const OPEN: RouteAccess = RouteAccess::Open;
const CALL: RouteAccess = RouteAccess::Needs(KeyScope::Infer);
const CONTROL: RouteAccess = RouteAccess::Needs(KeyScope::Control);
const MANAGE: RouteAccess = RouteAccess::Needs(KeyScope::Admin);
const SCRAPE: RouteAccess = RouteAccess::Needs(KeyScope::Metrics);

/// Every route, and the access that it needs.
pub(super) const EXPECTED: &[(&str, RouteAccess)] = &[
    ("/", CALL),
    ("/livez", OPEN),
    ("/readyz", OPEN),
    ("/health", OPEN),
    ("/ping", OPEN),
    ("/version", CALL),
    ("/load", CALL),
    ("/metrics", SCRAPE),
    ("/grpc.health.v1.Health/{*rest}", OPEN),
    ("/grpc.reflection.v1.ServerReflection/{*rest}", CALL),
    ("/grpc.reflection.v1alpha.ServerReflection/{*rest}", CALL),
    ("/evergreen/v2/actions", CALL),
    ("/evergreen", CALL),
    ("/evergreen.v2.EvergreenService/StartSession", CALL),
    ("/lmtp", CALL),
    ("/lmtp/tokenizer/{name}", CALL),
    ("/proxy/info", CALL),
    ("/v1/models", CALL),
    ("/v1/run", CALL),
    ("/v1/run/{name}/vars", CALL),
    ("/v1/run/{name}/vars/{variable}", CALL),
    ("/v1/controllers", CONTROL),
    ("/v1/controllers/tags", CALL),
    ("/v1/controllers/tags/{name}", CONTROL),
    ("/v1/controllers/{name}", CONTROL),
    ("/aici/{model}/v1/models", CALL),
    ("/aici/{model}/v1/run", CALL),
    ("/aici/{model}/v1/run/{name}/vars", CALL),
    ("/aici/{model}/v1/run/{name}/vars/{variable}", CALL),
    ("/aici/{model}/v1/controllers", CONTROL),
    ("/aici/{model}/v1/controllers/tags", CALL),
    ("/aici/{model}/v1/controllers/tags/{name}", CONTROL),
    ("/aici/{model}/v1/controllers/{name}", CONTROL),
    ("/v2", CALL),
    ("/v2/", CALL),
    ("/v2/health/live", OPEN),
    ("/v2/health/ready", OPEN),
    ("/v2/models/stats", CALL),
    ("/v2/models/{model}", CALL),
    ("/v2/models/{model}/ready", CALL),
    ("/v2/models/{model}/config", CALL),
    ("/v2/models/{model}/stats", CALL),
    ("/v2/models/{model}/generate", CALL),
    ("/v2/models/{model}/generate_stream", CALL),
    ("/v2/models/{model}/infer", CALL),
    ("/v2/models/{model}/trace/setting", CALL),
    ("/v2/models/{model}/versions/{version}", CALL),
    ("/v2/models/{model}/versions/{version}/{*rest}", CALL),
    ("/v2/repository/index", CALL),
    ("/v2/repository/models/{model}/load", MANAGE),
    ("/v2/repository/models/{model}/unload", MANAGE),
    ("/v2/requests/{id}", CALL),
    ("/v2/streams/{name}", CALL),
    ("/v2/trace/setting", CALL),
    ("/v2/logging", CALL),
    ("/v2/{*rest}", CALL),
    ("/inference.GRPCInferenceService/{method}", CALL),
    (
        "/inference.GRPCInferenceService/RepositoryModelLoad",
        MANAGE,
    ),
    (
        "/inference.GRPCInferenceService/RepositoryModelUnload",
        MANAGE,
    ),
];

/// Paths that no route matches: other spellings of served paths, and plausible ones.
pub(super) const OTHER_TABLES: &[&str] = &[
    "/nothing",
    "/livez/",
    "//livez",
    "/LIVEZ",
    "/%6civez",
    "/livez/../version",
    "/v2/%68ealth/live",
    "/v2/health/../models/stats",
    "/v2/repository/models/m/%75nload",
    "/v2/repository/models/m/unload/",
    "/grpc.health.v1.Health",
    "/inference.GRPCInferenceService/",
    "/inference.GRPCInferenceService/Repository%4DodelUnload",
    "/inference.GRPCInferenceService/RepositoryModelUnload/",
    "/no.such.Service/Method",
    "/v1/nothing",
    "/v1/controllers/",
    "/v1/controllers/tags/",
    "/v1//run",
    "/aici/m/proxy/info",
    "/aici//v1/run",
];

/// A path of a route, with a value for each of its names.
#[derive(Clone, Debug)]
pub(super) struct Target {
    pub(super) path: String,
    pub(super) kind: RouteKind,
    pub(super) access: RouteAccess,
}

/// Every path to request: those of the routes, every method that the gRPC services list, and unknown paths.
pub(super) fn targets(routes: &[Route]) -> Vec<Target> {
    let mut listed: Vec<_> = routes
        .iter()
        .map(|route| (&*route.path, route.access))
        .collect();
    let mut expected = EXPECTED.to_vec();
    listed.sort_unstable_by_key(|(path, _)| *path);
    expected.sort_unstable_by_key(|(path, _)| *path);
    assert_eq!(
        listed, expected,
        "the table of routes and that of the matrix"
    );
    let methods = methods();
    let each = routes.iter().flat_map(|route| {
        let paths = match route.kind {
            RouteKind::Http => vec![filled(&route.path)],
            RouteKind::Grpc => spelled(&route.path, &methods),
        };
        paths.into_iter().map(|path| Target {
            path,
            kind: route.kind,
            access: route.access,
        })
    });
    let other = OTHER_TABLES.iter().map(|path| Target {
        path: (*path).into(),
        kind: if path.starts_with("/inference") && path.contains("Repository%") {
            RouteKind::Grpc
        } else {
            RouteKind::Http
        },
        access: CALL,
    });
    each.chain(other).collect()
}

/// The methods of all services.
fn methods() -> Vec<String> {
    let described = [DESCRIPTORS, INFERENCE_DESCRIPTORS]
        .into_iter()
        .flat_map(|set| {
            let set = FileDescriptorSet::decode(set).unwrap();
            set.file.into_iter().flat_map(|file| {
                let package = file.package().to_owned();
                file.service.into_iter().flat_map(move |service| {
                    let name = format!("/{package}.{}", service.name());
                    let methods = service.method.into_iter();
                    methods.map(move |method| format!("{name}/{}", method.name()))
                })
            })
        });
    let others = [
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Watch",
        "/grpc.health.v1.Health/List",
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ];
    described.chain(others.map(str::to_owned)).collect()
}

/// The methods that a gRPC route accepts.
fn spelled(route: &str, methods: &[String]) -> Vec<String> {
    let Some((service, _)) = route.split_once('{') else {
        assert!(methods.iter().any(|method| method == route), "{route}");
        return vec![route.into()];
    };
    let has_own = |method: &&String| !EXPECTED.iter().any(|(path, _)| path == *method);
    let mine = methods.iter().filter(|method| method.starts_with(service));
    let mine: Vec<_> = mine.filter(has_own).cloned().collect();
    assert!(!mine.is_empty(), "{route}");
    mine
}

fn filled(route: &str) -> String {
    let names = [
        ("{model}", "parrot"),
        ("{version}", "1"),
        ("{name}", "parrot"),
        ("{id}", "nobody"),
    ];
    let path = names
        .into_iter()
        .fold(route.to_owned(), |path, (name, value)| {
            path.replace(name, value)
        });
    let path = path.replace("{version}/{*rest}", "1/generate");
    path.replace("{*rest}", "ready")
}

# cuDNN and its header-only frontend, for the gradient of attention over sequences of different
# lengths: the target leeway_cudnn where both are found, in CMAKE_PREFIX_PATH or beside Python's
# PyTorch, which brings the library.
set(python_packages ${TORCH_INSTALL_PREFIX}/..)
find_path(CUDNN_INCLUDE_DIR cudnn.h HINTS ${python_packages}/nvidia/cudnn/include)
find_path(CUDNN_FRONTEND_INCLUDE_DIR cudnn_frontend.h HINTS ${python_packages}/include)
find_library(CUDNN_LIBRARY NAMES cudnn libcudnn.so.9 NAMES_PER_DIR
             HINTS ${python_packages}/nvidia/cudnn/lib)
if(CUDNN_INCLUDE_DIR AND CUDNN_FRONTEND_INCLUDE_DIR AND CUDNN_LIBRARY AND TARGET CUDA::nvrtc)
  add_library(leeway_cudnn INTERFACE)
  target_include_directories(leeway_cudnn SYSTEM INTERFACE
    ${CUDNN_FRONTEND_INCLUDE_DIR} ${CUDNN_INCLUDE_DIR})
  # Only what uses them is linked with them: not the operators for Python.
  target_link_libraries(leeway_cudnn INTERFACE
    -Wl,--push-state,--as-needed ${CUDNN_LIBRARY} CUDA::nvrtc -Wl,--pop-state)
  target_compile_definitions(leeway_cudnn INTERFACE CUDNN_FRONTEND_SKIP_JSON_LIB)
else()
  message(STATUS "No cuDNN with its frontend: attention over uneven lengths has PyTorch's gradient")
endif()
